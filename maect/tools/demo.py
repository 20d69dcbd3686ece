"""`maect demo`: a first look within a minute, then the whole pipeline, in few lines."""

import logging
import sys
from collections.abc import Callable

from maect import experiment
from maect.launch.owner import lock_folder
from maect.tools.first_look import first_look, table

ASKED = (
    "protocols=knn,linear_probe,low_shot,clustering,umap",
    "tables=low_shot,clustering",
    "figures=umap,training_curves,reconstructions",
)
"""What the demo computes of the experiment `digits`."""
LINES = 30  # of the log, after a failure


def demo(snakemake: Callable[..., int]) -> int:
    """Show the first look, then run the pipeline; returns its exit status."""
    chosen = experiment.load("digits", **dict(word.split("=") for word in ASKED))
    log = chosen.root / "logs/demo.log"
    _say("A first look at 1,797 handwritten digits: about a minute on two idle cores.")
    ours = logging.getLogger("maect")
    level = ours.level
    ours.setLevel(logging.WARNING)
    try:
        with lock_folder(chosen.root, patience=0):  # it trains runs of the pipeline
            out = first_look(chosen)
    finally:
        ours.setLevel(level)
    _say(table(out))
    _say(f"Percent of 500 test digits. As a picture: {out / 'first_look.png'}")
    _say(f"Now the whole pipeline, about two minutes; what its jobs say is in {log}")
    status = snakemake("digits", "local", ASKED, log=log)
    if status == 0:
        from maect.report.render import show

        show(chosen.root)
        _say(f"Open {chosen.root / 'report.html'} in a browser.")
    elif status != 130 and log.exists():
        print(*log.read_text(errors="replace").splitlines()[-LINES:], sep="\n", file=sys.stderr)
    return status


def _say(line: str) -> None:
    print(line, flush=True)
