"""The first page of a report: the headline table and picture, the verdict, what to do next."""

import base64
import io
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from maect.core.files import read_table_text, write_text
from maect.report.configs import SummaryConfig
from maect.report.images import Explored
from maect.report.registry import named_figure
from maect.report.render import printed, render_page, verdicts
from maect.report.tables import read_table

GROUPS, PICTURES = 6, 8


def make_summary(path: Path) -> None:
    """`maect page summary.yaml`: beside it the page."""
    write_text(path.with_suffix(".html"), summary_page(SummaryConfig.read(path)))


def summary_page(config: SummaryConfig) -> str:
    """The page; it needs no other file.

    Raises:
        UserError: a table or figure that is not there, or not one of the registry.
    """
    table = config.table and printed(read_table(config.table), config.table.stem)
    claims = None
    if config.claims is not None:
        claims = pd.read_csv(io.StringIO(read_table_text(config.claims)), keep_default_na=False)
    return render_page(
        "summary.html",
        name=config.name,
        description=config.description,
        **(vars(table) if table else {}),
        table=bool(table),
        MISSING="",
        picture=data_uri(config.figure.read_bytes(), "png") if config.figure else "",
        picture_title=named_figure(config.figure.stem).title if config.figure else "",
        groups=_groups(config.explored) if config.explored else [],
        **({"summary": ""} if claims is None else verdicts(claims)),
        steps=next_steps(config),
    )


def _groups(path: Path) -> list[dict[str, Any]]:
    """The largest groups of images, with a few pictures of each."""
    explored = Explored.read(path)
    sizes = np.bincount(explored.arrays["clusters"])
    return [
        {
            "number": number,
            "size": size,
            "pictures": [
                data_uri(explored.picture(row), "jpeg")
                for row in explored.members(number)[:PICTURES]
            ],
        }
        for number, size in enumerate(sizes[:GROUPS].tolist())
    ]


def data_uri(image: bytes, kind: str) -> str:
    """An image as the source of an `img`, in lines: docutils refuses those of 10,000 characters."""
    text = base64.b64encode(image).decode()
    lines = (text[start : start + 4000] for start in range(0, len(text), 4000))
    return f"data:image/{kind};base64," + "\n".join(lines)


def next_steps(config: SummaryConfig) -> list[tuple[str, str]]:
    """What somebody with images of their own may do with the last run: why, and the command."""
    if config.run is None or config.images is None:
        return []
    run, images = (shlex.quote(str(path)) for path in (config.run, config.images))
    name = config.name
    steps = [
        (
            "Vectors of these or any other images, as a table",
            f"maect embed {run} {images} --out {name}.parquet",
        ),
        (
            "Groups of them without labels, with a page to look at",
            f"maect cluster {name}.parquet --out {name}-clusters",
        ),
        ("Images similar to one of yours", f"maect search {run} {name}.parquet IMAGE"),
    ]
    if config.explored is not None:  # so there are features of what it compares
        steps.append(("Duplicates and near-duplicates", f"maect audit {run}"))
    if config.classifies:
        steps.append(
            (
                "Classes of these or any other images, by the linear probe",
                f"maect predict {run} {images} --out {name}-classes.csv",
            )
        )
    steps.append(
        (
            "Vectors of a public encoder, usually better below about ten thousand images "
            "(maect retrieve dinov2_small weights fetches it)",
            f"maect embed dinov2_small {images} --out {name}-public.parquet",
        )
    )
    return [
        *steps,
        (
            "The encoder for timm, transformers and the Hugging Face hub",
            f"maect export {run} {name}-encoder",
        ),
        (
            "For better vectors of your own: more images, more epochs of the first stage, a larger "
            "size. Change them in the experiment and start it again; it trains only what depends "
            "on them",
            "",
        ),
    ]
