"""`make mutate`: its table names files that exist, and scores are of all mutants that count."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import mutation  # noqa: E402


def test_the_table_names_modules_and_tests_that_exist():
    for module, entry in mutation.load_table().items():
        assert {*entry} <= {"tests", "also", "endings", "ranks", "equivalent", "needs_gpu"}
        more = [*entry.get("ranks", []), *entry.get("also", [])]
        for name in (module, *entry["tests"], *more):
            assert (ROOT / name.partition("::")[0]).exists(), name


def test_scores_are_of_what_is_not_equivalent_and_needs_no_gpu():
    counts = {"mutants": 60, "killed": 8, "equivalent": 2, "needs_gpu": 3, "survived": 2}
    results = {"a.py": {"revision": "abc", "counts": counts, "survivors": ["f: x = 1", "g: y"]}}
    lines = mutation.score_table(results, ["a.py", "b.py"]).splitlines()
    assert lines[1:] == ["a.py,abc,60,15,8,2,3,2,80", "b.py"]
