"""The table of `make test-faults`: every trial, what is expected of it, and what was seen."""

import platform
from collections import defaultdict
from pathlib import Path

import pytest

ABOUT = """# Faults, tried

`make test-faults` runs the reproductions of three audits and writes this page: what others do to
your files, copies and other machines, lost and damaged files, odd input, kills and changes between
a kill and its resume. A row is a trial; its name says what is expected. *As expected* counts the
cases that were seen to end so; a trial that cannot be made on a machine says why.

{total} cases of {trials} trials on {machine}:
{passed} as expected, {failed} not, {skipped} not tried there.
"""


class FaultAudit:
    """Collects what pytest reports, and writes the page at the end."""

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
        """Write the page."""
        outcomes = [
            o for trials in self.seen.values() for cases in trials.values() for o, _ in cases
        ]
        lines = [
            ABOUT.format(
                total=len(outcomes), trials=sum(map(len, self.seen.values())),
                machine=f"{platform.system()}, Python {platform.python_version()}",
                **{name: outcomes.count(name) for name in ("passed", "failed", "skipped")},
            )
        ]  # fmt: skip
        for file in sorted(self.seen):
            lines += [f"## {file}", "", "| expected | trial | seen |", "| --- | --- | --- |"]
            for trial, cases in self.seen[file].items():
                name = trial.removeprefix("test_").replace("_", " ")
                about = self.said[file, trial].replace("|", r"\|")
                lines.append(f"| {name} | {about} | {_seen(cases)} |")
            lines.append("")
        self.page.write_text("\n".join(lines), encoding="utf-8")


def _seen(cases: list[tuple[str, str]]) -> str:
    """One cell: how many cases ended as expected, or why they were not tried."""
    passed = sum(outcome == "passed" for outcome, _ in cases)
    failed = sum(outcome == "failed" for outcome, _ in cases)
    reasons = {why for _, why in cases if why}
    parts = [f"as expected ({passed})"] if passed else []
    parts += [f"**NOT as expected ({failed})**"] if failed else []
    parts += [f"not tried here: {'; '.join(sorted(reasons))}"] if reasons else []
    return ", ".join(parts)
