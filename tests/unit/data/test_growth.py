"""The index and the order of a billion samples need neither time nor memory that grows."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))


@pytest.mark.parametrize("n", [10**4, 3 * 10**6, 10**9])
def test_a_billion_samples_fit(n: int) -> None:
    from growth import curve

    (line,) = curve((n,))
    assert line["n"] == n
    assert line["peak_mb"] < 300
    # The target is one second; this machine may be busy.
    assert line["open"] + line["first_batch"] + line["resume"] < 5
