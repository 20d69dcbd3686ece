"""What orchestration costs, on the test cluster (tests/cluster; needs root).

    python benchmarks/orchestration.py jobs [JOBS] [SECONDS EACH]

Short jobs on four nodes through Snakemake: their wall time against the sum of their own.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/cluster"))

from slurm_cluster import ACCOUNT, Cluster, missing  # noqa: E402

PLACE = Path(os.environ.get("TMPDIR", "/tmp")) / "maect-orchestration"
SLURM = {"cluster": "slurm", "partition": "booster", "account": ACCOUNT, "devices": 1}


def jobs(cluster: Cluster, count: int = 300, seconds: float = 5) -> None:
    arguments = {"steps": 10, "seconds": seconds / 10}
    start = [sys.executable, str(ROOT / "tests/unit/launch/start.py"), "RUN"]
    words = [*start, json.dumps(arguments), json.dumps(SLURM)]
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


def main() -> None:
    """Start a cluster, measure, stop it."""
    if sys.argv[1:2] != ["jobs"]:
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
        jobs(cluster, *map(int, sys.argv[2:]))
    finally:
        cluster.stop()
        print(f"load of the machine: {os.getloadavg()}")


if __name__ == "__main__":
    main()
