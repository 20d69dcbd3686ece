"""`make mutate`: its table names files that exist, and scores are of all mutants that count."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import mutation  # noqa: E402


def test_the_table_names_modules_and_tests_that_exist():
    for module, entry in mutation.load_table().items():
        assert {*entry} <= {"tests", "also", "endings", "equivalent"}
        for name in (module, *entry["tests"], *entry.get("also", [])):
            assert (ROOT / name.partition("::")[0]).exists(), name


def test_scores_are_of_what_is_not_equivalent():
    counts = {"mutants": 60, "killed": 8, "equivalent": 2, "survived": 2}
    results = {"a.py": {"revision": "abc", "counts": counts, "survivors": ["f: x = 1", "g: y"]}}
    lines = mutation.score_table(results, ["a.py", "b.py"]).splitlines()
    assert lines[1:] == ["a.py,abc,60,12,8,2,2,80", "b.py"]
