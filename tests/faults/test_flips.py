"""Bits and digits flipped, blocks zeroed, files cut: every record of a pipeline, every reader.

A reader that meets a damaged record names it, or does as before; nothing is silent, and nothing
ends in a traceback.
"""

import contextlib
import io
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from maect import load
from maect.cli import main
from maect.core.context import Context
from maect.core.errors import UserError
from maect.core.files import read_record
from maect.data.changes import changes
from maect.data.index import open_index
from maect.data.pixels import open_pixels
from maect.data.shard_plan import image_names
from maect.evaluate import EvaluationConfig
from maect.evaluate.evaluation import Completion, evaluate
from maect.evaluate.probe_training import STATE
from maect.records import RunRecord
from maect.train.checkpoint import check_files, complete_states, state_record
from maect.train.run_folder import check_weights, is_finished, take_over_folder

SEED = 7
RUN, STEM = "ct_tiny", "digits"
Reader = Callable[[Path, Path], object]
"""Given the results and an empty folder, it returns or leaves there what it has read."""


def command(*words: str, leaves: tuple[str, ...] = (), out: str = "") -> Reader:
    """A command on the results, what it prints, and the files that it leaves."""

    def read(root: Path, folder: Path) -> object:
        given = [word.format(root=root, out=folder / out) for word in words]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            status = main(given)
        if status:
            raise Ended(status)
        files = [root / name for name in leaves] + [p for p in folder.rglob("*") if p.is_file()]
        content = {file.name: file.read_bytes() for file in sorted(files)}
        return said.getvalue().replace(str(folder), "OUT"), content

    return read


AGAIN = "computed again"


class Ended(Exception):
    """A command has ended with a line."""


def the_images(root: Path, folder: Path) -> object:
    """All of a split, with labels and names, as training reads them."""
    index = open_index(root / "shards" / STEM / "train")
    pixels = open_pixels(index)
    images = [index.read(i) for i in range(index.n)]
    made = np.empty((1, 3, 16, 16), np.uint8)
    index.render(0, np.array([[0, 0, 16, 16, 16, 16, 0, 0]], np.int32), made)
    names = index.class_names, index.keys(), image_names(index), index.labels.tolist()
    # Where the array is left out, with a warning, the images are decoded: the same.
    same = pixels is None or pixels.tobytes() == PIXELS[0]
    return names, images, index.digest, index.channels, same


def what_changed(root: Path, folder: Path) -> object:
    """What a start says of images that have changed since they were sharded."""
    return str(changes(root / "shards" / STEM / "train"))


def is_there(name: str) -> Reader:
    """Whether an evaluation counts as done; if not, it is computed again."""

    def read(root: Path, folder: Path) -> object:
        there = Completion(root / f"evaluations/{RUN}/{name}.yaml").is_there()
        return there or AGAIN

    return read


def again(name: str) -> Reader:
    """An evaluation computed again from its inputs."""

    def read(root: Path, folder: Path) -> object:
        told = EvaluationConfig.read(root / f"evaluations/{RUN}/{name}.yaml")
        told.write(folder / f"{name}.yaml")
        evaluate(Context(cpus=2), config=folder / f"{name}.yaml")
        left = folder / f"{name}.safetensors"
        return (folder / f"{name}.json").read_text(), left.exists() and left.read_bytes()

    return read


def resumed(root: Path, folder: Path) -> object:
    """What a training reads first."""
    run = root / "runs" / RUN
    told = read_record(RunRecord.path(run))
    take_over_folder(
        run,
        IDENTITY[0],
        {key: told[key] for key in ("stage", "settings", "seed", "encoder", "source")},
    )
    return "claimed"


def finished(root: Path, folder: Path) -> object:
    """Whether a run counts as finished, and its states as sound."""
    run = root / "runs" / RUN
    told = is_finished(run, IDENTITY[0])
    check_weights(run)
    for state in complete_states(run / "state"):
        check_files(state, state_record(state, IDENTITY[0]), 0, 1)
    return told


IDENTITY: list[str] = []
PIXELS: list[bytes] = []
"""Of the training split, as they were before any damage."""


def encoded(root: Path, folder: Path) -> object:
    """What `maect.load` makes of an image."""
    encoder = load(root / "runs" / RUN, "cpu")
    return encoder.encode([np.zeros((16, 16, 3), np.uint8)]).tobytes()


SHOW = command("show", "{root}")
STATUS = command("status", "{root}")
LOW_SHOT = command("page", "{root}/tables/low_shot.yaml", leaves=("tables/low_shot.csv",))
CLUSTERING = command("page", "{root}/tables/clustering.yaml", leaves=("tables/clustering.csv",))
CLAIMS = command("page", "{root}/claims.yaml", leaves=("claims.csv",))
IMAGES = command("page", "{root}/images.yaml", leaves=("images.html",))
REPORT = command("page", "{root}/report.yaml", leaves=("report.html",))
CLEAN = command("clean", "{root}")
DUPLICATES = command("duplicates", "{root}/runs/" + RUN, "--out", "{out}", out="twice")
PUBLISH = command("publish", "{root}/runs/" + RUN, "{out}", "--repository", "me/birds", out="hub")
EXPORT = command("export", "{root}/runs/" + RUN, "{out}", out="export")
PREDICT = command(
    "predict", "{root}/runs/" + RUN, "{root}/../images/val", "--out", "{out}", out="c.csv"
)
FITTED = command(
    "predict", "{root}/runs/" + RUN, "{root}/../images/val", "--out", "{out}/c.csv", "--labelled",
    "{root}/features/" + RUN + "/digits-train.safetensors", "--classifier", "{out}/c.safetensors",
)  # fmt: skip


VAL = "{root}/../images/val"
SEARCH = command("search", "{root}/runs/" + RUN, "{root}/vectors.parquet", VAL + "/0/0150.png")
ALIKE = command("duplicates", "{root}/vectors.parquet", "--out", "{out}", out="alike")
LABELLED = command(
    "predict", "{root}/runs/" + RUN, VAL, "--out", "{out}/c.csv", "--labelled",
    "{root}/vectors.parquet", "--classifier", "{out}/c.safetensors",
)  # fmt: skip
CLASSIFIED = command(
    "predict", "{root}/runs/" + RUN, VAL, "--out", "{out}", "--classifier",
    "{root}/classifier.safetensors", out="c.csv",
)  # fmt: skip
COMPARE = command(
    "compare", "{root}/runs/" + RUN, "--images", VAL, "--out", "{root}/compared", "--threads", "1",
    leaves=("compared/compare.csv",),
)  # fmt: skip
PROBE = "linear_probe"


def exported(root: Path, folder: Path) -> object:
    """What `maect.load` makes of an image by an exported folder."""
    encoder = load(root / "export", "cpu")
    return encoder.resize, encoder.encode([np.zeros((16, 16, 3), np.uint8)]).tobytes()


def resumed_probe(root: Path, folder: Path) -> object:
    """A probe's training that goes on from what it saved."""
    shutil.copytree(root / "probing", folder / "probing")
    told = EvaluationConfig.read(root / f"probing/{PROBE}.yaml")
    told.write(folder / f"probing/{PROBE}.yaml")
    evaluate(Context(cpus=2), config=folder / f"probing/{PROBE}.yaml")
    left = folder / f"probing/{PROBE}.safetensors"
    return read_record(left.with_suffix(".json"))["metrics"], left.read_bytes()


def figure(name: str) -> Reader:
    return command("page", "{root}/figures/" + name + ".yaml", leaves=(f"figures/{name}.png",))


KINDS: dict[str, tuple[str, tuple[Reader, ...]]] = {
    "completion record": (
        f"runs/{RUN}/run.json",
        (LOW_SHOT, STATUS, PUBLISH, figure("pipeline"), finished),
    ),
    "record of a source": ("runs/mae_tiny/run.json", (CLAIMS, figure("training_curves"), CLEAN)),
    "encoder": (f"runs/{RUN}/encoder.safetensors", (EXPORT, encoded, is_there("knn"), finished)),
    "head": (f"runs/{RUN}/head.safetensors", (finished,)),
    "log": (f"runs/{RUN}/metrics.jsonl", (figure("training_curves"), STATUS)),
    "log of a pre-training": ("runs/mae_tiny/metrics.jsonl", (CLAIMS, figure("training_curves"))),
    "record of the job": (f"runs/{RUN}/job.json", (STATUS,)),
    "what a run is told": (f"runs/{RUN}/recipe.json", (STATUS, resumed)),
    "record of a state": (f"runs/{RUN}/state/step-000000007/state.json", (finished,)),
    "note of a rank": (f"runs/{RUN}/state/step-000000007/rank-0000.json", (finished, CLEAN)),
    "state": (f"runs/{RUN}/state/step-000000007/rank-0000.safetensors", (finished,)),
    "features to train on": (f"features/{RUN}/digits-train.safetensors", (again("knn"), FITTED)),
    "features to test on": (
        f"features/{RUN}/digits-val.safetensors",
        (again("knn"), DUPLICATES, is_there("knn")),
    ),
    "result": (f"evaluations/{RUN}/knn.json", (LOW_SHOT, PUBLISH, is_there("knn"))),
    "result of clustering": (
        f"evaluations/{RUN}/clustering.json",
        (CLUSTERING, figure("confusion")),
    ),
    "result of a map": (f"evaluations/{RUN}/umap.json", (figure("umap"),)),
    "map": (f"evaluations/{RUN}/umap.safetensors", (figure("umap"), is_there("umap"))),
    "clusters": (
        f"evaluations/{RUN}/clustering.safetensors",
        (figure("confusion"), again("retrieval")),
    ),
    "images to look through": (f"evaluations/{RUN}/explore.safetensors", (IMAGES, REPORT)),
    "probe": (f"evaluations/{RUN}/linear_probe.safetensors", (PREDICT, is_there("linear_probe"))),
    "pairs that look alike": ("duplicates.json", (IMAGES,)),
    "table": ("tables/low_shot.csv", (SHOW, CLAIMS, REPORT)),
    "claims": ("claims.csv", (REPORT,)),
    "checksum of a table": ("tables/low_shot.csv.sha256", (SHOW,)),
    "index's record": ("shards/digits/train/index.json", (the_images, DUPLICATES)),
    "index": ("shards/digits/train/index.npy", (the_images,)),
    "names of images": ("shards/digits/train/keys.txt", (the_images, DUPLICATES)),
    "checksums of images": ("shards/digits/train/crc32.npy", (the_images,)),
    "shard": ("shards/digits/train/train-000000.tar", (the_images,)),
    "decoded images": ("shards/digits/train/pixels.npy", (the_images,)),
    "record of decoded images": ("shards/digits/train/pixels.json", (the_images,)),
    "plan": ("shards/digits/train/plan.json", (the_images, what_changed)),
    "listing": ("shards/digits/train/parts/000000.jsonl", (the_images,)),
    "vectors": ("vectors.parquet", (SEARCH, ALIKE, LABELLED)),
    "classifier": ("classifier.safetensors", (CLASSIFIED,)),
    "exported weights": ("export/model.safetensors", (exported,)),
    "record of an export": ("export/config.json", (exported,)),
    "saved probe": (f"probing/.{PROBE}.state/{STATE}", (resumed_probe,)),
    "kept vectors": ("compared/vectors/*.safetensors", (COMPARE,)),
    "noted files": ("shards/digits/train/files.json", (what_changed,)),
}
"""Kinds of records: the file in the results, and who reads it."""


def damages(data: bytes, count: int, seed: str) -> Iterator[tuple[str, bytes]]:
    """Damaged versions of a file: what was done, and its content then."""
    draw = random.Random(f"{SEED} {seed}")
    digits = [i for i, byte in enumerate(data) if 48 <= byte < 58] if data.isascii() else []
    for number in range(count):
        changed, at = bytearray(data), draw.randrange(len(data))
        way = ("bit", "digit", "bit", "zeros", "bit", "cut")[number % 6]
        if way == "digit" and digits:
            at = draw.choice(digits)
            changed[at] = draw.choice([d for d in range(48, 58) if d != data[at]])
        elif way == "zeros":
            end = min(len(data), at + draw.choice((1, 16, 512)))
            changed[at:end] = bytes(end - at)
        elif way == "cut":
            del changed[at:]
        else:
            changed[at] ^= 1 << draw.randrange(8)
        if changed != data:
            yield f"{way} at byte {at}", bytes(changed)


def tried(reader: Reader, root: Path, folder: Path, file: Path) -> tuple[str, object, str]:
    """How a reader ends: "read", "named", "unnamed" or a traceback; what it read; what it said."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    said, result, how = io.StringIO(), None, "read"
    with contextlib.redirect_stderr(said):
        try:
            result = reader(root, folder)
        except (Ended, UserError, OSError) as error:
            said.write(str(error))
            how = "ended"
        except Exception as error:
            said.write(repr(error))
            how = "traceback"
    text = said.getvalue()
    # The record, or what has to be removed and made again: the folder or the table that it is of.
    names = {file.name, file.name.removesuffix(".sha256"), f"{file.parent}:", f"{file.parent}/"}
    if how == "ended":
        how = "named" if any(name in text for name in names) else "unnamed"
    elif how == "read" and any(name in text for name in names):
        how = "warned"
    return how, result, text


def new_lines(result: object, right: object) -> set[str]:
    """Lines that a command has printed this time only."""
    if not (isinstance(result, tuple) and isinstance(right, tuple) and isinstance(result[0], str)):
        return set()
    return {*result[0].splitlines()} - {*right[0].splitlines()}


@pytest.fixture(scope="module")
def results(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy in which each file is put back after its damage."""
    folder = tmp_path_factory.mktemp("flips")
    shutil.copytree(pristine, folder / "pipeline", symlinks=True)
    root = folder / "pipeline/results"
    IDENTITY[:] = [read_record(RunRecord.path(root / "runs" / RUN))["fingerprint"]]
    PIXELS[:] = [np.load(root / "shards" / STEM / "train/pixels.npy").tobytes()]
    for words in (
        ["embed", f"{root}/runs/{RUN}", VAL, "--kind", "folder", "--out", "{root}/vectors.parquet"],
        ["export", f"{root}/runs/{RUN}", "{root}/export", "--resize", "20"],
    ):
        assert main([word.format(root=root) for word in words]) == 0
    LABELLED(root, folder)
    shutil.copy(folder / "c.safetensors", root / "classifier.safetensors")
    COMPARE(root, folder)
    told = EvaluationConfig.read(
        root / f"evaluations/{RUN}/{PROBE}.yaml", ["settings.epochs=2", "settings.batch_size=16"]
    )
    told.write(root / f"probing/{PROBE}.yaml")
    assert evaluate(Interrupted(), config=root / f"probing/{PROBE}.yaml") == "requeue"
    return root


class Interrupted(Context):
    """Told to stop after six updates."""

    def __init__(self) -> None:
        super().__init__(cpus=2)
        self.asked = 0

    def stop_requested(self) -> bool:
        self.asked += 1
        return self.asked >= 6


@pytest.mark.parametrize("trials", [6, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KINDS)
def test_no_damage_is_silent(name, trials, results, tmp_path):
    """Flips, zeros and cuts of one kind of record, and everybody who reads it."""
    pattern, readers = KINDS[name]
    (file,), folder = sorted(results.glob(pattern)), tmp_path / "out"
    before = {path: path.read_bytes() for path in results.rglob("*") if is_small(path)}
    data = before[file] = file.read_bytes()
    sound = [tried(reader, results, folder, file) for reader in readers]
    assert [how for how, *_ in sound] == ["read"] * len(sound), sound
    faults, counts = [], Counter[str]()
    for what, damaged in damages(data, trials, name):
        for reader, (_, right, _) in zip(readers, sound, strict=True):
            file.write_bytes(damaged)
            how, result, text = tried(reader, results, folder, file)
            if how == "read":
                how = "without effect" if result == right else "silent"
                how = AGAIN if result is AGAIN else how
                if how == "silent" and any(str(file) in line for line in new_lines(result, right)):
                    how = "warned"
            counts[how] += 1
            if how in ("silent", "traceback", "unnamed"):
                faults.append(f"{what}: {how}: {readers.index(reader)}: {text[-300:]}")
            for path, content in before.items():
                if not path.exists() or path.read_bytes() != content:
                    path.write_bytes(content)
    print(f"{name}: {dict(counts)}")
    assert not faults, "\n".join(faults)


def is_small(path: Path) -> bool:
    """A file that a reader may write again."""
    written = (".csv", ".html", ".sha256", ".md", ".tex", ".png", ".pdf", ".json")
    return path.is_file() and path.suffix in written and "shards" not in path.parts
