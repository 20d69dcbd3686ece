"""The table of `make test-faults`: every trial, what is expected of it, and what was seen."""

import csv
from collections import defaultdict
from pathlib import Path

import pytest


class FaultAudit:
    """Collects what pytest reports, and writes a CSV file at the end."""

    def __init__(self, page: Path) -> None:
        self.page = page
        self.seen: dict[str, dict[str, list[tuple[str, str]]]] = defaultdict(dict)
        self.said: dict[tuple[str, str], str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item):  # type: ignore[no-untyped-def]
        """Send a trial's docstring with its report, from wherever it runs."""
        report = yield
        text = getattr(getattr(item, "function", None), "__doc__", None) or ""
        report.user_properties.append(("trial", " ".join(text.split("\n\n")[0].split())))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a case ended."""
        if report.when != "call" and report.outcome == "passed":
            return
        file, _, case = report.nodeid.partition("::")
        trial = case.partition("[")[0]
        why = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            why = report.longrepr[2].removeprefix("Skipped: ")
        self.seen[file].setdefault(trial, []).append((report.outcome, why))
        self.said[file, trial] = dict(report.user_properties).get("trial", "")

    def pytest_sessionfinish(self) -> None:
        """Write the table, a line for each trial."""
        lines = [["file", "expected", "trial", "seen"]]
        for file in sorted(self.seen):
            for trial, cases in self.seen[file].items():
                name = trial.removeprefix("test_").replace("_", " ")
                lines.append([file, name, self.said[file, trial], _seen(cases)])
        with self.page.open("w", encoding="utf-8", newline="") as table:
            csv.writer(table, lineterminator="\n").writerows(lines)


def _seen(cases: list[tuple[str, str]]) -> str:
    """One cell: how many cases ended as expected, or why they were not tried."""
    passed = sum(outcome == "passed" for outcome, _ in cases)
    failed = sum(outcome == "failed" for outcome, _ in cases)
    reasons = {why for _, why in cases if why}
    parts = [f"as expected ({passed})"] if passed else []
    parts += [f"NOT as expected ({failed})"] if failed else []
    parts += [f"not tried here: {'; '.join(sorted(reasons))}"] if reasons else []
    return ", ".join(parts)
