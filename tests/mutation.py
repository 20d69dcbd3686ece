"""Mutation testing: plant small faults in a module, one at a time, and run the tests that guard it.

`make mutate` does so for the modules of mutation.yaml with mutmut. It writes the scores to
docs/results/reliability/mutation.csv, and beside it the faults that no test noticed. Stopped, it
continues; a module is done again when it or its tests change. For some modules:
`make mutate MODULES=maect/data/order.py`.

By default it tries a fifth of the mutants, those whose number within their function ends with 3
or 8, or with the `endings` of the module in the table; `--endings 0123456789` tries all of them,
which takes hours.

mutmut runs the tests that call a mutant's function in their own process. What survives is tried
again with the `ranks` of the table, tests of processes: those are forked and have the mutant, too.
"""

import argparse
import csv
import hashlib
import io
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests/mutation.yaml"
RESULTS = ROOT / "docs/results/reliability/mutation.json"
BUILD = ROOT / "build/mutation"
COLUMNS = (
    "module", "revision", "mutants", "tried", "killed", "equivalent", "needs_gpu", "survived",
    "killed_percent",
)  # fmt: skip
UNTRIED = "not checked"
KILLED = ("killed", "timeout", "segfault", "caught by type check")
PRELOAD = (
    "deepspeed", "deepspeed.runtime.zero.stage3", "deepspeed.runtime.zero.stage_1_and_2",
    "maect.train.trainer", "pytest",
)  # fmt: skip
"""What ranks import, once for all mutants."""


def load_table() -> dict[str, dict[str, Any]]:
    """Read the tests and the equivalent mutants of each module."""
    table: dict[str, dict[str, Any]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return table


def run(module: str, entry: dict[str, Any], children: int, endings: str) -> dict[str, Any]:
    """Try the mutants of a module whose numbers have these last digits; return its result."""
    folder = BUILD / module.removesuffix(".py").replace("/", ".")
    ranks = entry.get("ranks", [])
    state = endings + _digest([module, *entry["tests"], *ranks, *entry.get("also", [])])
    if not (folder / "state").exists() or (folder / "state").read_text() != state:
        subprocess.run(["rm", "-rf", str(folder)], check=True)
        folder.mkdir(parents=True)
        _prepare(folder, module, entry)
        (folder / "revision").write_text(_revision())  # that mutmut is about to copy
        (folder / "state").write_text(state)
    if not (folder / "done").exists():
        left = [f"*__mutmut_*{digit}" for digit in endings]
        if statuses := _statuses(folder):  # of a run that was stopped
            untried = [name for name, status in statuses.items() if status == UNTRIED]
            left = [name for name in untried if name[-1] in endings]
        if left:
            _try(folder, children, left)
        if ranks:
            _try_on_ranks(folder, children, entry)
        (folder / "done").touch()
    counts = {"mutants": 0, "killed": 0, "equivalent": 0, "needs_gpu": 0, "survived": 0}
    survivors = []
    for name, status in _statuses(folder).items():
        counts["mutants"] += 1
        if status == UNTRIED:
            continue
        fault = "" if status in KILLED else _fault(folder, name)
        kind = "killed" if status in KILLED else _listed(fault, entry) or "survived"
        counts[kind] += 1
        if kind == "survived":
            survivors.append(fault if status == "survived" else f"{fault} ({status})")
    revision = (folder / "revision").read_text()
    return {"revision": revision, "counts": counts, "survivors": survivors}


def _listed(fault: str, entry: dict[str, Any]) -> str:
    """Return the list of the table that has a fault, or all faults of its function; or ''."""
    function = fault.partition(": ")[0]
    for kind in ("equivalent", "needs_gpu"):
        if entry.get(kind, {}).keys() & {fault, function}:
            return kind
    return ""


def _statuses(folder: Path) -> dict[str, str]:
    """Return what became of each mutant."""
    statuses = {}
    for line in _mutmut(folder, "results", "--all", "true").stdout.splitlines():
        name, _, status = line.strip().rpartition(": ")
        statuses[name] = status
    return statuses


@cache
def _fault(folder: Path, name: str) -> str:
    """Return a mutant as the table names it: FUNCTION: CHANGED LINE."""
    diff = _mutmut(folder, "show", name).stdout
    function = name.rpartition(".")[2].rpartition("__mutmut_")[0].removeprefix("x_")
    return f"{function.replace('ǁ', '.').removeprefix('x.')}: {_changed(diff)}"


def _try(folder: Path, children: int, names: list[str]) -> None:
    _mutmut(folder, "run", "--max-children", str(children), *names, stdout=None)


def _try_on_ranks(folder: Path, children: int, entry: dict[str, Any]) -> None:
    """Try again with tests of ranks what survived the other tests, if no list has it."""
    statuses = _statuses(folder)
    survivors = [name for name, how in statuses.items() if how not in (*KILLED, UNTRIED)]
    names = [name for name in survivors if not _listed(_fault(folder, name), entry)]
    if not names:
        return
    path = folder / "mutants/mutmut-stats.json"  # mutmut's own (3.8)
    stats = json.loads(path.read_text(encoding="utf-8"))
    tests = [name for name in stats["duration_by_test"] if name.startswith(tuple(entry["ranks"]))]
    functions = {name.rpartition("__mutmut_")[0] for name in statuses}
    stats["tests_by_mangled_function_name"] = dict.fromkeys(functions, tests)
    path.write_text(json.dumps(stats), encoding="utf-8")
    _try(folder, children, names)


def _prepare(folder: Path, module: str, entry: dict[str, Any]) -> None:
    """Make a folder in which mutmut sees the repository with a configuration for one module."""
    for name in ("maect", "tests", *entry.get("also", [])):
        (folder / name).symlink_to(ROOT / name)
    settings = {
        "source_paths": ["maect"],
        "only_mutate": [module],
        "also_copy": entry.get("also", []),
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "-n", "0"],
        # Ranks come first: tests of one process leave threads in it.
        "pytest_add_cli_args_test_selection": [*entry.get("ranks", []), *entry["tests"]],
        "use_git_change_detection": False,
        "process_isolation": "forkserver",  # trainings leave threads, which no fork has
        "timeout_multiplier": 10.0,  # of wall time too, which other processes lengthen
    }
    if "ranks" in entry:
        (folder / "preload").write_text("\n".join(PRELOAD), encoding="utf-8")
        settings |= {"forkserver_warmup": "import", "preload_modules_file": "preload"}
    pytest = "addopts = \"--strict-markers -m 'not slow'\"\n"
    pytest += 'markers = ["slow: minutes", "cluster: needs SLURM"]\n'
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    text = f"[tool.pytest.ini_options]\n{pytest}\n[tool.mutmut]\n" + "\n".join(lines) + "\n"
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")


def _mutmut(
    folder: Path, *arguments: str, stdout: int | None = subprocess.PIPE
) -> "subprocess.CompletedProcess[str]":
    """Run mutmut in a module's folder; by default return what it prints."""
    return subprocess.run(
        [sys.executable, "-m", "mutmut", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_THREAD_LIMIT": "1",  # whatever a test asks for: a fork would wait for the others
            "MAECT_TEST_RANKS": "fork",
            "DS_ACCELERATOR": "cpu",
        },
        check=True,
        stdout=stdout,
        text=True,
    )


def _changed(diff: str) -> str:
    """Return the lines that a mutant has in place of others."""
    added = [line[1:].strip() for line in diff.splitlines() if line[:1] == "+"]
    return " ".join(line for line in added if not line.startswith("++"))


def _digest(names: list[str]) -> str:
    """Return the identity of files and of the Python files in folders."""
    digest = hashlib.sha256(repr(names).encode())
    for name in names:
        path = ROOT / name.partition("::")[0]
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _revision() -> str:
    command = ["git", "rev-parse", "--short=9", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def score_table(results: dict[str, dict[str, Any]], modules: list[str]) -> str:
    """Return the scores as CSV; a module that was never run has an empty row.

    `killed_percent` is of the mutants that are not equivalent and need no GPU.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for module in modules:
        if module not in results:
            writer.writerow([module])
            continue
        counts = results[module]["counts"]
        tried = sum(counts[key] for key in COLUMNS[4:8])
        percent = 100 * counts["killed"] / max(1, counts["killed"] + counts["survived"])
        numbers = [counts["mutants"], tried, *(counts[key] for key in COLUMNS[4:8])]
        writer.writerow([module, results[module]["revision"], *numbers, round(percent)])
    return stream.getvalue()


def main() -> None:
    """Run the modules that are named, or all; write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*")
    parser.add_argument("--children", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--endings", help="last digits of the mutants to try")
    arguments = parser.parse_args()
    table = load_table()
    for module in arguments.modules or table:
        endings = arguments.endings or str(table[module].get("endings", "38"))
        result = run(module, table[module], arguments.children, endings)
        # Read now: meanwhile others may have written theirs.
        results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        results[module] = result
        text = json.dumps(results, indent=1, ensure_ascii=False, sort_keys=True)
        RESULTS.write_text(f"{text}\n", encoding="utf-8")
        scores = score_table(results, list(table))
        RESULTS.with_suffix(".csv").write_text(scores, encoding="utf-8")
        print(f"{module}: {result['counts']}")


if __name__ == "__main__":
    main()
