"""Some classes of a split, without copying its images."""

from pathlib import Path

from maect.core.errors import UserError
from maect.core.files import read_record
from maect.data.sources.base import ImageSource, Source, read_list

# ImageNet-Dogs-15 as the deep clustering literature uses it (Chang et al. 2017).
DOGS15 = (
    "n02085936", "n02086646", "n02088238", "n02091467", "n02097130",
    "n02099601", "n02101388", "n02101556", "n02102177", "n02105056",
    "n02105412", "n02105855", "n02107142", "n02110958", "n02112137",
)  # fmt: skip
CLASS_LISTS = {"dogs15": DOGS15}


class ClassView(Source):
    """An index of its own into another split's shards; `maect.data.subsets` writes it."""

    kind = "view"
    about = "the shards of a split: some of its `classes`, without copying"
    takes = ("of", "classes")
    needs = ("of", "classes")
    sharded = False


def read_classes(text: str) -> tuple[str, ...]:
    """Class names: those of a list that has a name here, or of a text file, one a line."""
    return CLASS_LISTS[text] if text in CLASS_LISTS else tuple(read_list(Path(text)))


def check_classes(classes: str, shards: Path, split: ImageSource) -> None:
    """Look for a view's classes in its split, as far as they are known before it is sharded.

    The shards of that split are there, or will be; `split` is what they are made of.
    """
    if classes not in CLASS_LISTS and not Path(classes).exists():
        return
    if (shards / "index.json").exists():
        known = read_record(shards / "index.json")["class_names"]
    else:
        known = split.known_classes()
    for name in read_classes(classes) if known is not None else ():
        if name not in known:
            raise UserError(f"classes {classes}: {name!r} is no class of {split.path}")
