"""Commands that use an encoder on images, or give it to others."""

import logging
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from maect.core.errors import UserError, counted
from maect.core.files import RUN, need, read_json, write_text
from maect.core.log import CONTROL
from maect.data.commands import StatedPixels

log = logging.getLogger(__name__)

Positive = Annotated[int, Parameter(validator=Number(gte=1))]
LARGE = "*.safetensors filter=lfs diff=lfs merge=lfs -text"
"""Line of `.gitattributes`, by which the hub keeps weights apart from other files."""
ENCODER = "folder of a run, or one that maect export wrote; or a public encoder's name"
Encoder = Annotated[Path, Parameter(help=ENCODER)]
Images = Annotated[Path, Parameter(help="a folder, or a .csv or .tsv table with a column path")]
Kind = Annotated[str | None, Parameter(help="what IMAGES is, if something else (docs/data.md)")]
BatchSize = Annotated[
    Positive | None, Parameter(help="on the device (default: as many as suit it, at most 256)")
]
Device = Annotated[
    str | None, Parameter(help="such as cpu or cuda:1; by default a GPU where there is one")
]
Resize = Annotated[
    int | None,
    Parameter(help="shorter side before the centre crop, if not that of the run's config.yaml"),
]


def embed(
    run: Encoder,
    images: Images,
    /,
    *,
    kind: Kind = None,
    batch_size: BatchSize = None,
    device: Device = None,
    out: Path | None = None,
    afresh: bool = False,
    precision: Literal["fp32", "bf16"] = "fp32",
    pixels: StatedPixels = None,
) -> None:
    """Compute a vector for each image, or for new images only if the file is there.

    `maect embed dinov2_small photos`

    Args:
        out: table to write, X.parquet (default IMAGES.parquet, here).
        afresh: compute all vectors again, and replace the file whatever made it.
        precision: of the encoder's products (default fp32); bf16 takes about half the time on CPUs
            and GPUs that have it, and search follows.
    """
    from maect import load
    from maect.answers.vectors import SUFFIX, check_output, embed_into

    out = out or Path(f"{images.resolve().name}{SUFFIX}")
    check_output(out, SUFFIX, [images])
    encoder = load(run, device, precision, pixels=pixels)
    made = embed_into(out, encoder, images, kind, batch_size, afresh)
    _say_left_out(made.left_out)
    kept = f", {made.kept} of them kept from before" if made.kept else ""
    count = f"{counted(made.images, 'image')}{kept}, {len(made.left_out)} left out"
    print(f"{out}: {count}; {made.width} numbers each")


def _say_left_out(images: dict[str, str]) -> None:
    for name, why in images.items():
        log.warning("%s: left out: %s", name, why)


def cluster(
    index: Path,
    /,
    *,
    out: Path,
    groups: Positive | None = None,
    images: Path | None = None,
) -> None:
    """Group images by their vectors, without labels.

    `maect cluster birds.parquet --out groups`

    Args:
        index: a .parquet that maect embed wrote.
        out: folder of the table and the page.
        groups: how many, by k-means (default: as many as a graph of neighbours has).
        images: where the images are, if they have moved.
    """
    from maect.answers.groups import write_clusters
    from maect.answers.vectors import Vectors
    from maect.evaluate.clustering import cluster as group

    vectors = Vectors.read(index)
    source = vectors.source(images)  # before the work
    clusters = group(vectors.values, groups)
    write_clusters(vectors, clusters, out, source)
    if clusters.grains:
        print(f"also possible: {', '.join(map(str, clusters.grains))} groups (--groups N)")
    print(f"{out}: {clusters.count} groups; open {out / 'index.html'}")


def search(
    run: Encoder,
    index: Path,
    image: Sequence[str],
    /,
    *,
    count: Positive = 10,
    device: Device = None,
    pixels: StatedPixels = None,
) -> None:
    """Find the images that are most like a given one.

    `maect search results/birds/runs/ct_min birds.parquet photo.jpg --count 5`

    Args:
        index: a .parquet that maect embed wrote with it.
        image: images to find similar ones for, read as those of the index were.
        count: images to print of each (default 10).
    """
    from maect import load
    from maect.answers.vectors import Vectors, nearest

    vectors = Vectors.read(index)
    read = vectors.pixels.reading | (pixels or {})
    encoder = load(run, device, vectors.about.get("precision", "fp32"), pixels=read)
    vectors.check(encoder, index)
    similarities, found = nearest(vectors, encoder.encode(image), count)
    for asked, near, numbers in zip(image, similarities, found, strict=True):
        if len(image) > 1:
            print(asked)
        for similarity, number in zip(near, numbers, strict=True):
            print(f"{similarity:.4f}  {vectors.files[number].translate(CONTROL)}")


def duplicates(
    what: Path,
    /,
    *,
    out: Path | None = None,
    images: Path | None = None,
    dataset: str | None = None,
    pixels: StatedPixels = None,
) -> None:
    """List equal files and near-duplicates, of a folder or across the splits of a run.

    `maect duplicates photos --out twice`

    Args:
        what: images; a .parquet that maect embed wrote; or the folder of a run, whose splits with
            features are compared.
        out: folder of the tables and the page; of a run by default RESULTS/duplicates/RUN.
        images: where the images of a .parquet are, if they have moved.
        dataset: of a run with features of several data sets, the one to search.
    """
    from maect.answers.duplicates import search_images, search_splits
    from maect.core.files import write_record
    from maect.evaluate.base import encoder_checksum
    from maect.experiment.pages import DUPLICATES

    run = what.absolute()
    left_out = 0
    if (run / "encoder.safetensors").is_file():
        folder = out or run.parents[1] / "duplicates" / run.name
        found, digests = search_splits(run, folder, dataset)
        if out is None:
            about = {"run": run.name, "encoder_sha256": encoder_checksum(run), "splits": digests}
            write_record(run.parents[1] / DUPLICATES, about | {"pairs": found.rows})
    elif out is None:
        raise UserError(f"{what}: name the folder of the tables and the page with --out")
    else:
        folder = out
        found, left_out = search_images(what, out, images, pixels)
    counts = found.counts
    near = counted(counts["near"], "pair")
    more = ", the most alike of more" if found.cut else ""
    print(
        f"{folder}: {counted(counts['equal'], 'pair')} of equal files, {near} of "
        f"near-duplicates{more}, {counted(counts['link'], 'link')}, {left_out} images left out"
    )
    print(f"Open {folder / 'index.html'}, which says what to do")


def sort(table: Path, images: Path, out: Path, /, *, link: bool = False) -> None:
    """Copy or link images into a folder for each group or class.

    `maect sort groups/clusters.csv photos sorted --link`

    Args:
        table: clusters.csv, or a .csv of maect predict.
        images: folder of the images, which stay as they are.
        out: new folder: OUT/GROUP/FILE.
        link: symbolic links in place of copies.
    """
    from maect.answers.groups import sort_images

    for group, count in sort_images(table, images, out, link).items():
        print(f"{count:6d}  {out / group}")


def predict(
    run: Encoder,
    images: Images,
    /,
    *,
    kind: Kind = None,
    batch_size: BatchSize = None,
    device: Device = None,
    out: Path,
    classifier: Path | None = None,
    labelled: Path | None = None,
    pixels: StatedPixels = None,
) -> None:
    """Name the class of each image.

    `maect predict results/birds/runs/ct_min new_photos --out classes.csv`

    Args:
        out: table to write, X.csv.
        classifier: file of one (default: that of a fine-tuned run, or the linear probe that the
            pipeline trained).
        labelled: fit logistic regression on this features file, or .parquet of maect embed, and
            write it to --classifier.
    """
    from maect import load
    from maect.answers.classes import (
        check_replaceable,
        classifier_of,
        fit_classifier,
        read_classifier,
        write_classes,
    )
    from maect.answers.vectors import Work, check_output, parts_of

    check_output(out, ".csv", [images])
    path = classifier or classifier_of(run)
    if labelled is not None:
        if classifier is None:
            raise UserError("--labelled: name the file to keep the classifier in with --classifier")
        check_replaceable(classifier)
        classes = fit_classifier(labelled)
    else:
        classes = read_classifier(path)
    # Evaluations may resize images otherwise than the run says: they are of another data set.
    read = classes.reading | (pixels or {})
    encoder = load(run, device, resize=classes.resize, pixels=read)
    classes.check(encoder, path)
    work = Work(encoder, images, kind, batch_size)
    folder = parts_of(out)
    if labelled is not None:
        classes.write(path)
    write_classes(work.parts(folder), classes, out)
    shutil.rmtree(folder, ignore_errors=True)
    _say_left_out(work.left_out)
    images_read = f"{counted(work.count, 'image')}, {len(work.left_out)} left out"
    print(f"{out}: {images_read}; {len(classes.class_names)} classes")


def export(
    run: Path,
    out: Path,
    /,
    *,
    resize: Resize = None,
    licence: str | None = None,
    onnx: bool = False,
) -> None:
    """Write an encoder for timm, transformers and the Hugging Face hub.

    `maect export results/digits/runs/ct_min_tiny exported`

    Args:
        run: folder of the run.
        out: folder to write to.
        licence: of the weights, for the model card, such as cc-by-4.0.
        onnx: also write model.onnx, for programs without PyTorch (needs maect[onnx]).
    """
    from maect.answers.card import card_of
    from maect.models.export import export_onnx, export_run
    from maect.stages.run import resize_of

    need(run / RUN, "finished run")
    print(export_run(run, out, resize or resize_of(run), card_of(run, licence)))
    if onnx:
        print(f"{export_onnx(out)}: images, normalised as config.json says, to vectors")


def publish(
    run: Path,
    out: Path,
    /,
    *,
    repository: Annotated[str, Parameter(metavar="USER/NAME")],
    resize: Resize = None,
    licence: str | None = None,
    base_model: Annotated[str | None, Parameter(metavar="USER/NAME")] = None,
) -> None:
    """Write the folder of a Hugging Face hub repository.

    `maect publish results/digits/runs/ct_min_tiny repository --repository USER/NAME`

    Args:
        run: folder of the run.
        out: folder of the repository, such as a clone of it.
        repository: its name on the hub.
        licence: of the weights, such as cc-by-4.0.
        base_model: model on the hub that the weights come from; known for timm's weights.
    """
    from maect.answers.card import card_of
    from maect.models.export import export_run
    from maect.stages.run import resize_of

    need(run / RUN, "finished run")
    card = card_of(run, licence, repository, base_model)
    # A fine-tuned run is published with its classifier, any other as an encoder.
    head = run / "head.safetensors" if card.labelled else None
    export_run(run, out, resize or resize_of(run), card, head)
    # Files of the folder that `export` does not write, such as those of a clone, stay.
    rules = out / ".gitattributes"
    lines = rules.read_text(encoding="utf-8").splitlines() if rules.exists() else []
    if LARGE not in lines:
        write_text(rules, "".join(f"{line}\n" for line in [*lines, LARGE]))
    classes = int(read_json(out / "config.json")["num_classes"])
    what = f"a classifier of {classes} classes" if classes else "an encoder"
    print(f"{out}: {what}, ready for the hub")
    # The last step needs an account and is for the user.
    print(f"Next: {shlex.join(('hf', 'upload', repository, str(out)))}")
