"""Names of runs that differ in their seed alone: RUN, RUN-s1, RUN-s2 ..."""

import re

SUFFIX = re.compile(r"-s(\d+)$")


def of_seed(name: str, seed: int) -> str:
    """Return the name of a run of this seed."""
    return f"{name}-s{seed}" if seed else name


def seedless(run: str) -> str:
    """Return the name of a run without its seed."""
    return SUFFIX.sub("", run)


def seed_of(run: str) -> int:
    """Return the seed in the name of a run."""
    match = SUFFIX.search(run)
    return int(match[1]) if match else 0
