"""What orchestration costs, on the test cluster (tests/cluster; needs root).

    python benchmarks/orchestration.py waiting [LAUNCHERS] [SECONDS]
    python benchmarks/orchestration.py jobs [JOBS] [SECONDS EACH]
    python benchmarks/orchestration.py latency SHARDS

waiting   launchers wait at once for jobs that do not start: memory and processor time
jobs      short jobs on four nodes through Snakemake: wall time against the sum of their own
latency   from a rule that could start to the first step of its training, in parts
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from maect.recipes import load_encoder
from maect.stages import load_recipe
from maect.stages.run import RunConfig

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests/cluster"), str(ROOT / "tests/unit/launch")]

from slurm_cluster import ACCOUNT, Cluster, missing  # noqa: E402

from maect.launch import record  # noqa: E402

PLACE = Path(os.environ.get("TMPDIR", "/tmp")) / "maect-orchestration"
SLURM = {"cluster": "slurm", "partition": "booster", "account": ACCOUNT}


def until(condition: Callable[[], object], seconds: float, pause: float = 0.5) -> None:
    """Poll until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s in vain")
        time.sleep(pause)


def launcher(folder: Path, arguments: dict, resources: dict) -> list[str]:
    start = [sys.executable, str(ROOT / "tests/unit/launch/start.py"), str(folder)]
    return [*start, json.dumps(arguments), json.dumps(resources)]


def spent(process: psutil.Process) -> float:
    """Processor seconds of a launcher and of the commands that it has run."""
    return sum(process.cpu_times()[:4])


def waiting(cluster: Cluster, count: int = 64, seconds: int = 300) -> None:
    resources = SLURM | {"sbatch": ["begin=now+1day"]}
    launchers = []
    with (PLACE / "launchers.log").open("w") as log:
        for number in range(count):
            command = launcher(PLACE / "runs" / f"run{number}", {"steps": 1}, resources)
            launchers.append(psutil.Popen(command, stderr=log))
            time.sleep(0.5)

    def submitted() -> bool:
        files = (PLACE / "runs").glob("*/job.json")
        return sum('"submitted"' in file.read_text() for file in files) == count

    until(submitted, 900)
    time.sleep(35)  # the first questions are asked
    used = sum(spent(process) for process in launchers)
    start = time.monotonic()
    time.sleep(seconds)
    wall = time.monotonic() - start
    used = sum(spent(process) for process in launchers) - used
    memory = [process.memory_full_info() for process in launchers]
    print(f"{count} launchers wait for {wall:.0f} s:")
    print(f"  memory together: {sum(m.pss for m in memory) / 2**20:.0f} MiB proportional set size")
    print(f"  the largest resident set: {max(m.rss for m in memory) / 1e6:.1f} MB")
    maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in launchers]
    print(f"  with torch: {sum('torch' in text for text in maps)}")
    print(f"  processor time: {used:.1f} s ({100 * used / wall / count:.2f} % of a core each)")
    for process in launchers:
        process.kill()


def jobs(cluster: Cluster, count: int = 300, seconds: float = 5) -> None:
    arguments = {"steps": 10, "seconds": seconds / 10}
    words = launcher(Path("RUN"), arguments, SLURM | {"devices": 1})
    command = " ".join(f"'{word}'" for word in words).replace("{", "{{").replace("}", "}}")
    command = command.replace("'RUN'", f"{PLACE}/runs/run{{wildcards.number}}")
    (PLACE / "Snakefile").write_text(
        f'rule all:\n    input: expand("{PLACE}/runs/run{{n}}/done.json", n=range({count}))\n'
        f'rule evaluate:\n    output: "{PLACE}/runs/run{{number}}/done.json"\n'
        f'    localrule: True\n    shell: """{command} 2> {PLACE}/{{wildcards.number}}.log"""\n'
    )
    options = ["--cores", "64", "--quiet", "all", "--nolock", "--directory", str(PLACE)]
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "snakemake", *options], cwd=PLACE, check=True)
    wall = time.monotonic() - start
    rows = cluster.run("sacct", "-X", "-n", "-P", "-o", "JobName,State,ElapsedRaw").splitlines()
    elapsed = [int(row.split("|")[2]) for row in rows if row.startswith("maect-run")]
    states = {row.split("|")[1] for row in rows if row.startswith("maect-run")}
    print(f"{count} jobs of {seconds} s of work on {len(cluster.nodes)} nodes: {wall:.0f} s")
    print(f"  SLURM's jobs: {len(elapsed)}, states {states}, {sum(elapsed)} s together")
    print(f"  their own work: {count * seconds:.0f} s, {count * seconds / 4:.0f} s on four nodes")
    print(f"  wall time over work on four nodes: {wall / (count * seconds / 4):.2f}")


def latency(cluster: Cluster, shards: str) -> None:
    run = PLACE / "runs" / "mae"
    RunConfig(
        run="mae", stage="pretrain", size="tiny", shards=Path(shards),
        encoder=load_encoder("tiny"), settings=load_recipe("mae", "tiny", {"epochs": 1}),
    ).write(run / "config.yaml")  # fmt: skip
    train = f"{sys.executable} -m maect train {run}/config.yaml"
    train += " --cluster slurm --devices 2 --cpus 1"
    train += f" --partition booster --account {ACCOUNT}"
    (PLACE / "Snakefile").write_text(
        f'rule train:\n    input: "ready"\n    output: "{run}/run.json"\n    localrule: True\n'
        f'    shell: "touch started; {train}"\n'
        'rule ready:\n    output: "ready"\n    localrule: True\n    shell: "touch ready"\n'
    )
    log = (PLACE / "snakemake.log").open("w")
    options = ["--cores", "4", "--nolock", "--directory", str(PLACE)]
    command = [sys.executable, "-m", "snakemake", *options, f"{run}/run.json"]
    process = subprocess.Popen(command, cwd=PLACE, stderr=log)
    until(lambda: (run / "metrics.jsonl").exists(), 600, 0.01)
    engine = time.time()
    until(lambda: record.progress(run, record.read_job(run)), 600, 0.01)
    first = time.time()
    process.wait(600)
    (place,) = (run / "jobs").iterdir()
    begun = json.loads((place / "rank-0.json").read_text())
    job = record.read_job(run).id
    shown = cluster.run("scontrol", "show", "job", job).split()
    started = next(word.split("=")[1] for word in shown if word.startswith("StartTime="))
    moments = {
        "Snakemake starts the rule": (PLACE / "started").stat().st_mtime,
        "the launcher starts, checks, writes its request": (run / "jobs").stat().st_mtime,
        "sbatch accepts (submitit, sbatch)": (place / f"{job}_submitted.pkl").stat().st_ctime,
        "SLURM starts the job (whole seconds)": time.mktime(
            time.strptime(started, "%Y-%m-%dT%H:%M:%S")
        ),
        "the ranks begin (srun, Python, submitit)": begun["time"],
        "torch and DeepSpeed are imported, the ranks connected": (run / "recipe.json")
        .stat()
        .st_mtime,
        "the model and the engine are made": engine,
        "the first step is done": first,
    }
    before = ready = (PLACE / "ready").stat().st_mtime
    for name, moment in moments.items():
        print(f"| {name} | {moment - before:.1f} | {moment - ready:.1f} |")
        before = moment


def main() -> None:
    """Start a cluster, measure, stop it."""
    known = {"waiting": waiting, "jobs": jobs, "latency": latency}
    what = known.get((sys.argv[1:] or [""])[0])
    if what is None:
        sys.exit(__doc__)
    if reason := missing():
        sys.exit(reason)
    shutil.rmtree(PLACE, ignore_errors=True)
    (PLACE / "runs").mkdir(parents=True)
    cluster = Cluster(PLACE / "cluster", nodes=4, port=27900)
    os.environ["SLURM_CONF"] = str(cluster.conf)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests/unit/launch"), str(ROOT)])
    print(f"load of the machine: {os.getloadavg()}, {os.cpu_count()} cores")
    try:
        cluster.start()
        arguments = sys.argv[2:] if what is latency else map(int, sys.argv[2:])
        what(cluster, *arguments)
    finally:
        cluster.stop()
        print(f"load of the machine: {os.getloadavg()}")


if __name__ == "__main__":
    main()
