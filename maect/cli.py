"""The `maect` command: parse, call, print. Heavy modules are imported when they are needed."""

import argparse
import errno
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

from maect import __version__
from maect.core.errors import UserError, counted
from maect.core.files import PIPELINE, need
from maect.core.log import command_log
from maect.core.processes import environment, open_closed_streams
from maect.data.sources import BUNDLED, SOURCES

if TYPE_CHECKING:
    from maect.answers.encoder import ImageEncoder
    from maect.answers.vectors import Vectors
    from maect.data.config import ShardsConfig
    from maect.evaluate import EvaluationConfig
    from maect.recipes import Pixels
    from maect.stages.run import RunConfig
    from maect.tools.jobs import Where

log = logging.getLogger(__name__)
File = TypeVar("File", "RunConfig", "EvaluationConfig")

OF_THE_SYSTEM = {
    errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.EFBIG, errno.EINVAL, errno.EIO, errno.EISDIR,
    errno.ELOOP, errno.EMFILE, errno.ENAMETOOLONG, errno.ENFILE, errno.ENOENT, errno.ENOMEM,
    errno.ENOSPC, errno.ENOTDIR, errno.ENOTEMPTY, errno.EPERM, errno.EROFS, errno.ESTALE,
}  # fmt: skip
"""What a disk, a path or its rights may refuse: a line, and no traceback."""
ENCODER = "folder of a run, or one that maect export wrote; or a public encoder's name"
IMAGES = "a folder, or a .csv or .tsv table with a column path"
DEVICE = "such as cpu or cuda:1; by default a GPU where there is one"
PROFILE = "name or folder of a cluster profile (default local: this machine)"
LOG = "also write messages to this file"
RESIZE = "shorter side before the centre crop, if not that of the run's config.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0 done, 2 wrong input, 130 interrupted, 141 nobody reads the output.
    """
    open_closed_streams()
    try:
        try:
            return run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `maect ... | head` has read enough
        # The interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def run(arguments: Sequence[str] | None) -> int:
    """Run one command, each of its errors a line; returns the exit status."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if options.call is run_experiment:
        options.arguments = rest
    elif rest:
        known = [f"--{name.replace('_', '-')}" for name in vars(options)]
        near = get_close_matches(rest[0].partition("=")[0], known, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else f"maect {options.command} --help"
        parser.error(f"{options.command}: unknown {' '.join(rest)}; {hint}")
    with command_log(getattr(options, "log", None)):
        try:
            return options.call(options) or 0
        except UserError as error:
            log.error("maect %s: %s", options.command, error)
            return 2
        except OSError as error:
            if error.errno not in OF_THE_SYSTEM:
                raise
            where = f"{error.filename}: " if error.filename is not None else ""
            log.error("maect %s: %s%s", options.command, where, error.strerror)
            return 2
        except KeyboardInterrupt:
            log.error("maect %s: interrupted", options.command)
            return 130


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = Parser(
        prog="maect",
        description="Train, use and evaluate image encoders without labels.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"maect {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listed: dict[str, str] = {}

    def command(
        name: str, call: Any, help: str, *parents: Any, names: Sequence[str] = (), example: str = ""
    ) -> Parser:
        sub = subparsers.add_parser(name, description=help, parents=list(parents))
        listed[name] = help.split(". ")[0].rstrip(".")
        sub.set_defaults(call=call)
        sub.names, sub.example = names, example
        return sub

    launching, changing = launch_options(), change_options()

    sub = command(
        "run", run_experiment,
        "Run an experiment, or resume it. Other words, such as a target, -n or --cores 4, are "
        "passed to Snakemake.",
        names=("experiments", "tables", "figures"), example="run digits --cores 2",
    )  # fmt: skip
    sub.add_argument("experiment", help="name or path")
    sub.add_argument("--profile", default="local", help=PROFILE)
    sub.add_argument("--config", nargs="+", default=[], metavar="KEY=VALUE", help="as Snakemake's")

    command("demo", demo, "Try the pipeline on handwritten digits, and print its tables.")

    sub = command(
        "shard", shard, "Write images as webdataset tars with an index.",
        example="shard photos/train shards/train --shards 4",
    )  # fmt: skip
    sub.add_argument(
        "source", type=Path,
        help="the images: a folder or archive of the given kind; or the config.yaml of shards",
    )  # fmt: skip
    sub.add_argument(
        "out", type=Path, nargs="?",
        help="folder of the shards, whose name names the split; not with a config.yaml",
    )  # fmt: skip
    sub.add_argument(
        "--kind",
        default="folder",
        help="what SOURCE is (docs/data.md; folder by default): "
        + "; ".join(f"{kind}: {source.about}" for kind, source in SOURCES.items()),
    )
    sub.add_argument("--shards", type=int, default=1, help="number of tars (default 1)")
    sub.add_argument("--labels", type=Path, help="labels of the source, for kinds that need them")
    sub.add_argument("--only-listed", type=Path, help="file of image names to take, one a line")
    sub.add_argument("--exclude", type=Path, help="file of image names to leave out, one a line")
    sub.add_argument(
        "--skip-unreadable",
        action="store_true",
        help="leave out images that cannot be read; the index lists them",
    )
    sub.add_argument(
        "--shorter-side", type=int, help="recompress larger images to this shorter side"
    )
    sub.add_argument(
        "--pixels", type=pixels_of, metavar="JSON",
        help="of a data set (docs/data.md): orientation, background, range, channels",
    )  # fmt: skip
    sub.add_argument("--classes", help="for a view: dogs15, or a file of class names, one a line")
    sub.add_argument("--only", help="one step: plan, the number of a shard, or index")
    sub.add_argument("--verify", action="store_true", help="check shards that were written")
    sub.add_argument("--log", help=LOG)

    sub = command(
        "retrieve", retrieve, "Download public data or weights.",
        names=("data and weights",), example="retrieve mae_base weights",
    )  # fmt: skip
    sub.add_argument("what", help="digits, or a name from docs/data.md or docs/weights.md")
    sub.add_argument("out", type=Path, help="folder to put it in")

    sub = command(
        "resolve", resolve, "Write the settings file of every job of an experiment.",
        names=("experiments",), example="resolve digits",
    )  # fmt: skip
    sub.add_argument("experiment", help="name or path")
    sub.add_argument("--config", nargs="+", default=[], metavar="KEY=VALUE", help="as Snakemake's")

    sub = command(
        "train", train, "Train a run, or resume it.",
        launching, changing,
        names=("recipes", "sizes"),
        example="train runs/mae/config.yaml settings.epochs=10 --out runs/mae10/config.yaml",
    )  # fmt: skip
    sub.add_argument("--save-every-minutes", type=float, default=2.0, help="default 2")
    sub.add_argument(
        "--convert-world-size", action="store_true", help="resume on another number of ranks"
    )
    sub.add_argument(
        "--gpu", default="", help="what each GPU is, such as A100-40GB: a step that is too large "
        "for it is computed in parts, or refused; asked of this machine where the job runs here",
    )  # fmt: skip
    sub.add_argument(
        "--stage-to", metavar="DIR", help="copy the shards to this folder of each node first; "
        "or the name of the node's environment variable that holds it (TMPDIR)",
    )  # fmt: skip

    sub = command(
        "replay", replay, "Repeat a step of a training and compare it with the log, bit by bit.",
        launching,
        example="replay results/digits/runs/mae_tiny --step 100",
    )  # fmt: skip
    sub.add_argument("run", type=Path, help="folder of the run; nothing is written into it")
    sub.add_argument("--step", type=positive, required=True, help="counted from 1, as in the log")
    sub.add_argument("--out", type=Path, help="write what the step was to this JSON file")

    sub = command(
        "import", import_weights, "Turn downloaded weights into a run.",
        names=("layouts", "sizes"),
        example="import weights/mae_pretrain_vit_base.pth results/mine/runs/mae_base",
    )  # fmt: skip
    sub.add_argument("weights", type=Path, help="a checkpoint, as published; or the resolved file "
                     "of a run that imports one, which says everything else")  # fmt: skip
    sub.add_argument("run", type=Path, nargs="?", help="the run's folder, for a checkpoint")
    sub.add_argument("--layout", help="one of docs/weights.md; detected if not given")
    sub.add_argument("--timm", metavar="NAME", help="the model's name in timm, in place of layout "
                     "and size (docs/reference/timm_encoders.md)")  # fmt: skip
    sub.add_argument("--size", help="encoder size; detected if not given")
    sub.add_argument("--image-size", type=int, help="pixels to use it at; its own if not given")

    sub = command(
        "export", export, "Write an encoder for timm, transformers and the Hugging Face hub.",
        example="export results/digits/runs/ct_min_tiny exported",
    )  # fmt: skip
    sub.add_argument("run", type=Path, help="folder of the run")
    sub.add_argument("out", type=Path, help="folder to write to")
    sub.add_argument("--resize", type=int, help=RESIZE)
    sub.add_argument("--licence", help="of the weights, for the model card, such as cc-by-4.0")

    sub = command(
        "publish", publish, "Write the folder of a Hugging Face hub repository.",
        example="publish results/digits/runs/ct_min_tiny repository --repository USER/NAME",
    )  # fmt: skip
    sub.add_argument("run", type=Path, help="folder of the run")
    sub.add_argument("out", type=Path, help="folder of the repository, such as a clone of it")
    sub.add_argument("--repository", metavar="USER/NAME", required=True, help="its name on the hub")
    sub.add_argument("--resize", type=int, help=RESIZE)
    sub.add_argument("--licence", help="of the weights, such as cc-by-4.0")
    sub.add_argument(
        "--base-model", metavar="USER/NAME",
        help="on the hub, that the weights come from (default: timm's, of weights of timm)",
    )  # fmt: skip

    sub = command(
        "features", features, "Compute an encoder's features of a split.", launching,
        example="features results/birds/runs/ct_min --shards shards/val --out val.safetensors",
    )  # fmt: skip
    sub.add_argument("run", type=Path, help="folder of the run")
    sub.add_argument("--shards", type=Path, required=True, help="folder of a split's shards")
    sub.add_argument("--out", type=Path, required=True, help="the file to write")
    sub.add_argument("--resize", type=int, help=RESIZE)
    sub.add_argument(
        "--precision", choices=["fp32", "tf32", "bf16"],
        help="of the encoder's products; by default tf32 from ViT-B's width on, which takes a GPU "
        "about an eighth of the time of fp32",
    )  # fmt: skip
    sub.add_argument(
        "--before-norm", action="store_true", help="leave out the encoder's final norm"
    )
    sub.add_argument(
        "--blocks", type=int, default=1, metavar="N",
        help="with --before-norm: what the last N blocks give, side by side",
    )  # fmt: skip

    using = use_options()
    sub = command(
        "embed", embed, "Compute a vector for each image; of a file's new images, if it is there.",
        using, names=("public encoders",), example="embed dinov2_small photos",
    )  # fmt: skip
    sub.add_argument("run", type=Path, help=ENCODER)
    sub.add_argument("images", type=Path, help=IMAGES)
    sub.add_argument(
        "--out", type=Path,
        help="X.parquet, which cluster and search read; X.csv; or X.npy, with X.files.csv "
        "(default IMAGES.parquet, here)",
    )  # fmt: skip
    sub.add_argument("--afresh", action="store_true", help="compute all vectors again")
    sub.add_argument(
        "--precision", choices=["fp32", "bf16"], default="fp32",
        help="of the encoder's products (default fp32); bf16 takes about half the time on CPUs and "
        "GPUs that have it, and search follows",
    )  # fmt: skip

    sub = command(
        "cluster", cluster, "Group images by their vectors, without labels.",
        example="cluster birds.parquet --out groups",
    )  # fmt: skip
    sub.add_argument("index", type=Path, help="a .parquet that maect embed wrote")
    sub.add_argument("--out", type=Path, required=True, help="folder of the table and the page")
    sub.add_argument(
        "--groups",
        type=positive,
        help="how many, by k-means; found in a graph of neighbours if not given",
    )
    sub.add_argument("--method", choices=["graph", "kmeans", "hdbscan"])
    sub.add_argument("--smallest", type=positive, help="images in a cluster at least, for hdbscan")
    sub.add_argument("--images", type=Path, help="where the images are, if they have moved")

    sub = command(
        "search", search, "Find the images that are most like a given one.",
        example="search results/birds/runs/ct_min birds.parquet photo.jpg --count 5",
    )  # fmt: skip
    sub.add_argument("run", type=Path, help=ENCODER)
    sub.add_argument("index", type=Path, help="a .parquet that maect embed wrote with it")
    sub.add_argument("image", nargs="+", help="what to look for")
    sub.add_argument(
        "--count", type=positive, default=10, help="images to print of each (default 10)"
    )
    sub.add_argument("--device", help=DEVICE)

    sub = command(
        "audit", audit, "Find duplicates and near-duplicates across splits.",
        example="audit results/birds/runs/ct_min",
    )  # fmt: skip
    sub.add_argument("run", type=Path, help="folder of a run whose features were extracted")
    sub.add_argument(
        "--threshold", type=float, default=0.95,
        help="least cosine of standardised features of a pair (default 0.95)",
    )  # fmt: skip
    sub.add_argument("--within", action="store_true", help="also pairs inside a split")
    sub.add_argument("--dataset", help="which, if the run has features of several")
    sub.add_argument("--out", type=Path, help="folder of the tables and the page; by default "
                     "RESULTS/audits/RUN")  # fmt: skip

    sub = command(
        "duplicates", duplicates, "List the images of a folder that are most alike.",
        example="duplicates photos --out twice",
    )  # fmt: skip
    sub.add_argument("what", type=Path, help="images, or a .parquet that maect embed wrote")
    sub.add_argument("--out", type=Path, required=True, help="folder of the tables and the page")
    sub.add_argument(
        "--count", type=positive, default=50, help="pairs beside equal files (default 50)"
    )
    sub.add_argument(
        "--images", type=Path, help="where those of a .parquet are, if they have moved"
    )

    sub = command(
        "sort", sort, "Copy or link images into a folder for each group or class.",
        example="sort groups/clusters.csv photos sorted --link",
    )  # fmt: skip
    sub.add_argument("table", type=Path, help="clusters.csv, or a .csv of maect predict")
    sub.add_argument("images", type=Path, help="folder of the images, which stay as they are")
    sub.add_argument("out", type=Path, help="new folder: OUT/GROUP/FILE")
    sub.add_argument("--link", action="store_true", help="symbolic links in place of copies")

    sub = command(
        "predict", predict, "Name the class of each image.", using,
        example="predict results/birds/runs/ct_min new_photos --out classes.csv",
    )  # fmt: skip
    sub.add_argument("run", type=Path, help=ENCODER)
    sub.add_argument("images", type=Path, help=IMAGES)
    sub.add_argument("--out", type=Path, required=True, help="X.csv")
    sub.add_argument(
        "--classifier",
        type=Path,
        help="by default that of a fine-tuned run, or the linear probe that the pipeline left",
    )
    sub.add_argument(
        "--labelled", type=Path,
        help="fit logistic regression on this features file, or .parquet of maect embed, and keep "
        "it as --classifier",
    )  # fmt: skip

    sub = command(
        "compare", compare, "Compare encoders on folders of images, without training.",
        example="compare results/birds/runs/mae results/birds/runs/ct_min --images photos",
    )  # fmt: skip
    sub.add_argument("encoders", nargs="+", metavar="ENCODER", help=f"{ENCODER}; or NAME=FOLDER")
    sub.add_argument(
        "--images", nargs="+", required=True, metavar="FOLDER",
        help="CLASS/IMAGE, maybe below train/ and val/, or images without classes; an archive or "
        "a table; or NAME=FOLDER",
    )  # fmt: skip
    sub.add_argument(
        "--out", type=Path, default=Path("compared"),
        help="folder of the tables, the page and the vectors, which are kept (default compared)",
    )  # fmt: skip
    sub.add_argument("--device", help=DEVICE)
    sub.add_argument("--threads", type=positive, help="that measure; default: all cores")
    sub.add_argument(
        "--real-labels", type=Path, metavar="FILE",
        help="ImageNet-ReaL's real.json: score ImageNet's validation images by it, too",
    )  # fmt: skip

    command(
        "evaluate", evaluate, "Evaluate an encoder in one way.", launching, changing,
        names=("evaluations",),
        example="evaluate evaluations/mae/knn.yaml settings.k=[5] --out evaluations/mae/k5.yaml",
    )  # fmt: skip

    resolved = argparse.ArgumentParser(add_help=False)
    resolved.add_argument("config", type=Path, help="the resolved file")
    command(
        "page", page, "Make one page of a report: a table, a figure, claims, images or summary.",
        resolved, names=("tables", "figures"), example="page results/digits/tables/low_shot.yaml",
    )  # fmt: skip

    sub = command(
        "status", status, "Show the state of every run.",
        example="status results/digits",
    )  # fmt: skip
    sub.add_argument("root", type=Path, nargs="*", help="results folder; default: results/*")

    sub = command(
        "sync", sync, "Copy a run's log to Weights & Biases or MLflow.",
        example="sync wandb results/digits/runs/mae_tiny",
    )  # fmt: skip
    sub.add_argument("service", choices=["wandb", "mlflow"])
    sub.add_argument("run", type=Path, help="folder of the run, finished or not")
    sub.add_argument("--project", default="maect", help="what to put it into (default maect)")

    sub = command(
        "new-experiment", new_experiment, "Write an experiment for your own images.",
        names=("recipes", "sizes", "evaluations"),
        example="new-experiment --images photos --out birds.yaml --quick",
    )  # fmt: skip
    sub.add_argument(
        "--images", type=Path, required=True,
        help="CLASS/IMAGE, or images without classes, either maybe below train/, val/ and test/; "
        "an archive or a table of images; or a folder of tars or tables (docs/data.md)",
    )  # fmt: skip
    sub.add_argument("--out", type=Path, required=True, help="the experiment to write, .yaml")
    sub.add_argument(
        "--from-public", help="start from public weights: mae_base, mae_large or mae_huge14"
    )
    sub.add_argument(
        "--quick", action="store_true",
        help="for about an hour on this machine: a smaller encoder, fewer epochs",
    )  # fmt: skip
    sub.add_argument(
        "--ignore-folders", action="store_true", help="folders are no classes: use no labels"
    )
    sub.add_argument(
        "--skip-unreadable", action="store_true", help="leave out images that cannot be read"
    )

    sub = command(
        "plan", plan, "Estimate what is left to run: jobs, hours, storage.",
        names=("experiments",), example="plan --experiment digits --profile juwels",
    )  # fmt: skip
    sub.add_argument("target", nargs="*", help="as Snakemake's; default: the whole report")
    sub.add_argument("--experiment", default="paper", help="name or path")
    sub.add_argument("--profile", default="local", help=PROFILE)
    sub.add_argument("--config", nargs="+", default=[], metavar="KEY=VALUE", help="as Snakemake's")
    sub.add_argument(
        "--device",
        help="for what no run has measured: A100, H100, cpu, or here: a step of every stage is "
        "measured (default: here for a profile of this machine, else the profile's or A100)",
    )
    sub.add_argument(
        "--utilisation", type=fraction, default=0.35, help="of its peak (default 0.35)"
    )

    sub = command(
        "doctor", doctor, "Check whether this machine or cluster is ready.",
        example="doctor --profile juwels --experiment paper",
    )  # fmt: skip
    sub.add_argument("--experiment", default="paper", help="whose storage is checked")
    sub.add_argument("--profile", default="local", help=PROFILE)
    sub.add_argument("--config", nargs="+", default=[], metavar="KEY=VALUE", help="as Snakemake's")
    sub.add_argument("--no-job", action="store_true", help="only the checks that need no job")

    sub = command(
        "show", show, "Print the tables of a results folder.",
        example="show results/digits",
    )  # fmt: skip
    sub.add_argument("root", type=Path, help="such as results/digits")

    sub = command(
        "verify", verify,
        "Compute published numbers again, and compare them. Cells of tables, by name or drawn at "
        "random.",
        example="verify docs/results/digits low_shot.ct_min.knn",
    )  # fmt: skip
    sub.add_argument("published", type=Path, help="such as docs/results/digits")
    sub.add_argument("cells", nargs="*", metavar="TABLE.METHOD.METRIC", help="none: ten at random")
    sub.add_argument("--out", type=Path, default=Path("verified"), help="default: verified")
    sub.add_argument("--seed", type=int, help="of the random choice; none: another one each time")
    sub.add_argument("--profile", default="local", help=PROFILE)

    sub = command(
        "leaderboard", leaderboard,
        "Write rows and logs for the leaderboard billpsomas/efficient-probing.",
        example="leaderboard results/paper/runs/ct_aug_large",
    )  # fmt: skip
    sub.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of evaluated runs")
    sub.add_argument("--out", type=Path, default=Path("leaderboard"), help="default: leaderboard")

    sub = command(
        "clean", clean, "List training states that are no longer needed, or remove them.",
        example="clean results/digits --remove",
    )  # fmt: skip
    sub.add_argument("root", type=Path, help="such as results/digits")
    sub.add_argument(
        "--remove", action="store_true", help="remove them; without it they are only listed"
    )

    parser.epilog = in_groups(listed)
    return parser


GROUPS = {
    "first steps": ("demo", "new-experiment", "run", "plan", "status", "show"),
    "use an encoder on images": (
        "embed", "cluster", "search", "duplicates", "predict", "sort", "audit", "compare",
    ),
    "public weights and sharing": (
        "retrieve", "import", "export", "publish", "leaderboard", "sync",
    ),
    "clusters and upkeep": ("doctor", "clean", "verify", "replay"),
}  # fmt: skip
"""Commands by what they are for; the others are single jobs of a pipeline."""


def in_groups(listed: Mapping[str, str]) -> str:
    """The list of commands in the help, each with its first sentence."""
    grouped = {name for names in GROUPS.values() for name in names}
    rest = tuple(name for name in listed if name not in grouped)
    width = max(map(len, listed))
    lines = []
    for title, names in (GROUPS | {"single jobs, by hand": rest}).items():
        lines += [f"{title}:", *(f"  {name:{width}}  {listed[name]}" for name in names), ""]
    return "\n".join(
        [*lines, "maect COMMAND --help has the options, and the names to choose from."]
    )


KNOWN = {
    "experiments": "maect.experiment:names",
    "recipes": "maect.recipes:recipe_names",
    "sizes": "maect.recipes:sizes",
    "evaluations": "maect.evaluate:evaluation_names",
    "tables": "maect.report.registry:TABLE_NAMES",
    "figures": "maect.report.registry:FIGURES",
    "layouts": "maect.models.layouts:LAYOUTS",
    "data and weights": "maect.data.retrieve:CATALOGUE",
    "public encoders": "maect.answers.public:PUBLIC",
}
"""Where the names of each kind are."""


class Parser(argparse.ArgumentParser):
    """Lists names at the end of a command's help: they are looked up when it is asked for.

    An option is written out: `--re` may be another one tomorrow than `--remove` today.
    """

    names: Sequence[str] = ()
    """Kinds of names (of `KNOWN`) that the command takes, or the files that it reads or writes."""
    example: str = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"allow_abbrev": False})

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse an unknown command with the nearest ones, and not with all."""
        if action.dest == "command" and action.choices is not None and value not in action.choices:
            near = get_close_matches(value, list(action.choices), n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "maect --help lists all"
            raise argparse.ArgumentError(None, f"unknown command {value!r}; {hint}")
        super()._check_value(action, value)

    def format_help(self) -> str:
        """The help, as printed."""
        lists = []
        for kind in self.names:
            known = resolve_name(KNOWN[kind])
            lists.append(f"{kind}: {', '.join(known() if callable(known) else known)}")
        self.epilog = ". ".join(lists) or self.epilog
        example = f"\nexample:\n  maect {self.example}\n" if self.example else ""
        return super().format_help() + example


def change_options() -> argparse.ArgumentParser:
    """A resolved file, and what differs from it."""
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group("what to run")
    group.add_argument("config", type=Path, help="the resolved file; results go beside it")
    group.add_argument(
        "changes", nargs="*", metavar="KEY=VALUE",
        help="in place of what the file says, e.g. settings.epochs=10 settings.head.topk=1 seed=1; "
        "this is another job, which needs --out",
    )  # fmt: skip
    group.add_argument(
        "--out", type=Path, metavar="FILE", help="write the changed file here, results beside it"
    )
    return parent


def launch_options() -> argparse.ArgumentParser:
    """Where and how to run; no part of a result's identity."""
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group("where to run")
    group.add_argument("--cluster", choices=["local", "slurm"], default="local")
    group.add_argument(
        "--nodes",
        default="1",
        help="a number, or a range such as 1..16: a training takes what its batch can use",
    )
    group.add_argument(
        "--devices",
        default="1",
        help="ranks per node; auto, gpus: one per GPU, and without GPUs two or one",
    )
    group.add_argument("--cpus", default="auto", help="CPUs per rank (auto: an equal share of all)")
    group.add_argument("--memory-mb", type=int, default=0, help="memory per node (0: any)")
    group.add_argument("--minutes", type=int, default=1440, help="wall limit of one job")
    group.add_argument("--partition", default="")
    group.add_argument("--account", default="")
    group.add_argument("--sbatch", default="", help="further sbatch options, KEY=VALUE,KEY=VALUE")
    group.add_argument("--setup", default="", help="script that the compute node sources first")
    group.add_argument("--python", default="", help="what ranks run in place of this Python")
    group.add_argument("--detach", action="store_true", help="leave the job running on Ctrl-C")
    group.add_argument("--log", help=LOG)
    return parent


def positive(text: str) -> int:
    """A number of things: the type of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def fraction(text: str) -> float:
    """A part of something: the type of an option."""
    try:
        if 0 < float(text) <= 1:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")


def pixels_of(text: str) -> "Pixels":
    """The type of `--pixels`; mean and deviation, which sharding needs not, may be left out."""
    from maect.core.settings import validated
    from maect.recipes import Pixels

    try:
        values = json.loads(text)
        blank = dict.fromkeys(("mean", "std"), [0.5] * int(values.get("channels", 3)))
        return validated(Pixels, blank | values, "--pixels")
    except (ValueError, AttributeError, UserError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def use_options() -> argparse.ArgumentParser:
    """How an encoder is used on anybody's images."""
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument("--kind", help="what IMAGES is, if something else (docs/data.md)")
    parent.add_argument(
        "--batch-size", type=positive, help="on the device (default 32 on a CPU, else 256)"
    )
    parent.add_argument("--device", help=DEVICE)
    return parent


def where_to_run(options: argparse.Namespace) -> "Where":
    """What `launch_options` say."""
    from maect.experiment.working_folder import other_clone
    from maect.launch import Resources
    from maect.launch.owner import SNAKEMAKE
    from maect.launch.resources import PROFILE, node_range
    from maect.tools.jobs import Where

    # Within a pipeline, that has said it once.
    if SNAKEMAKE not in os.environ and (note := other_clone(Path.cwd())):
        log.warning("%s", note)
    given = {option: getattr(options, option) for option, _ in PROFILE.values()}
    resources = Resources.parse(**given | {"nodes": node_range(options.nodes)[0]})
    return Where(resources, options.nodes, getattr(options, "gpu", ""), options.detach)


def read_changed(kind: type[File], options: argparse.Namespace) -> tuple[File, Path]:
    """A resolved file with the changes that the options make, and where it now is.

    Raises:
        UserError: changes that would be of another run than the one whose files lie beside it.
    """
    from maect.recipes.few_labels import FewLabels

    path, out = options.config, options.out
    config = kind.read(path, options.changes)
    if out is None:
        if options.changes:
            raise UserError(
                f"{path}: {options.changes[0]} makes this another job; name its file with --out"
            )
        return config, path
    config = config.named(out)
    if isinstance(config.settings, FewLabels):
        config = config.model_copy(update={"settings": config.settings.read_lists()})
    if out.exists() and out.read_text(encoding="utf-8") != config.text(out):
        raise UserError(f"{out}: exists and says something else; choose another --out")
    config.write(out)
    return config, out


def run_experiment(options: argparse.Namespace) -> int:
    """`maect run`: the status that Snakemake ends with."""
    from maect import experiment

    experiment.load(options.experiment, **changes_of(options.config))
    if options.arguments:
        from maect.tools.dry_run import check_words

        check_words(options.arguments, own=("--config", "--profile"))
    return snakemake(options.experiment, options.profile, options.config, options.arguments)


def snakemake(
    experiment: str, profile: str, config: Sequence[str], arguments: Sequence[str] = ()
) -> int:
    """Run Snakemake on the pipeline, wherever it is installed; returns its status."""
    from maect.experiment.profile import find_profile
    from maect.experiment.working_folder import check_working_folder

    check_working_folder()
    # Without this Snakemake would also take `default` or `profiles/default` for a profile.
    own = any(word.startswith("--workflow-profile") for word in arguments)
    process = subprocess.Popen([
        sys.executable, "-P", "-m", "maect.tools.start", "--snakefile", PIPELINE / "Snakefile",
        *arguments, "--profile", find_profile(profile) / "config.yaml",
        *(() if own else ("--workflow-profile", "none")),
        "--config", f"experiment={experiment}", *config,
    ], env=environment())  # fmt: skip
    # Ctrl-C reaches it, too: it lets the trainings save, which takes its time.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        status = process.wait()
        return 128 - status if status < 0 else status  # by a signal: as a shell says it
    finally:
        signal.signal(signal.SIGINT, before)


DEMO = (
    "protocols=knn,linear_probe,low_shot,clustering,umap",
    "tables=low_shot,clustering",
    "figures=umap,training_curves,reconstructions",
)


def demo(options: argparse.Namespace) -> int:
    """`maect demo`."""
    status = snakemake("digits", "local", DEMO)
    if status == 0:
        from maect.report.render import show as tables

        tables(Path("results/digits"))
    return status


def own_name() -> str:
    """How this command was called, for lines that can be pasted."""
    called = sys.argv[0]
    known = shutil.which("maect")
    if Path(called).name != "maect":
        return f"{shlex.quote(sys.executable)} -P -m maect"
    same = known is not None and os.path.samefile(known, called)
    return "maect" if same else shlex.quote(called)


def shard(options: argparse.Namespace) -> None:
    """`maect shard`: everything, or one step so that a pipeline can run them as separate jobs."""
    from maect.data import shards
    from maect.data.sources import find_source
    from maect.data.sources.view import read_classes
    from maect.data.subsets import class_view

    threads = len(os.sched_getaffinity(0))
    config, out = shards_of(options)
    if options.verify:
        print(f"{out}: {shards.verify(out, threads=threads)} samples, all intact")
    elif not find_source(config.kind).sharded:
        if not config.classes:
            raise UserError(f"--kind {config.kind}: name the classes with --classes")
        count = class_view(config.images, out, read_classes(config.classes))
        print(f"{out}: {count} samples of {config.images}")
    elif options.only == "plan":
        shards.plan_shards(config.images, config.kind, out, config.shards, **config.options)
    elif options.only == "index":
        shards.finish_index(out, threads=threads)
    elif options.only:
        if not options.only.isdecimal():
            raise UserError(f"--only {options.only}: must be plan, the number of a shard, or index")
        shards.write_shard(out, int(options.only), threads=1)
    else:
        count = shards.shard(
            config.images, out, config.kind, config.shards, threads=threads, **config.options
        )
        print(f"{out}: {count} samples")


def shards_of(options: argparse.Namespace) -> tuple["ShardsConfig", Path]:
    """The settings of shards, from their file or from the command line; and the shards' folder."""
    from maect.core.settings import validated
    from maect.data.config import ShardsConfig
    from maect.data.sources import find_source

    if options.out is None:
        if options.source.suffix != ".yaml":
            raise UserError(f"{options.source}: name the folder of the shards, too")
        return ShardsConfig.read(options.source), options.source.parent
    find_source(options.kind)
    names = ("kind", "shards", "labels", "exclude", "classes", "skip_unreadable", "shorter_side")
    stated = {name: getattr(options, name) for name in names}
    if options.pixels is not None:
        stated["pixels"] = options.pixels
    given = {"images": options.source, "only": options.only_listed, **stated}
    return validated(ShardsConfig, given, "maect shard"), options.out


def retrieve(options: argparse.Namespace) -> None:
    """`maect retrieve`."""
    if options.what in BUNDLED:
        resolve_name(BUNDLED[options.what])(options.out)
        return
    from maect.data.retrieve import retrieve as fetch

    for path in fetch(options.what, options.out):
        print(path)


def resolve(options: argparse.Namespace) -> None:
    """`maect resolve`: the pipeline writes the same files when it starts."""
    from maect import experiment
    from maect.experiment.resolve import files

    chosen = experiment.load(options.experiment, **changes_of(options.config))
    given = list(files(chosen))
    written = sum(config.write(path) for path, config in given)
    print(f"{chosen.root}: {len(given)} resolved files, {written} of them new or changed")


def changes_of(pairs: Sequence[str]) -> dict[str, str]:
    """What `--config KEY=VALUE` says of an experiment."""
    for pair in pairs:
        if "=" not in pair:
            raise UserError(f"--config {pair}: write KEY=VALUE")
    return {pair.partition("=")[0]: pair.partition("=")[2] for pair in pairs}


def train(options: argparse.Namespace) -> None:
    """`maect train`."""
    from maect.stages.run import RunConfig
    from maect.tools import jobs

    target = options.out or options.config
    theirs = target.parent / "config.yaml"
    if target.name != theirs.name and theirs.exists():
        raise UserError(f"{target}: its folder belongs to the run in {theirs.name}; choose another")
    config, path = read_changed(RunConfig, options)
    jobs.train(
        config,
        path,
        where_to_run(options),
        save_every_minutes=options.save_every_minutes,
        convert_world_size=options.convert_world_size,
        stage_to=options.stage_to,
    )


def replay(options: argparse.Namespace) -> None:
    """`maect replay`."""
    from maect.tools import jobs

    result = jobs.replay(options.run, options.step, where_to_run(options), options.out)
    print(f"{options.run.name}: ", "\n  ".join(result.lines), sep="")
    if result.differences:
        raise UserError(f"{options.run}: step {result.differences[0][0]} is not what it was")


def import_weights(options: argparse.Namespace) -> None:
    """`maect import`."""
    from maect.recipes import Pixels
    from maect.stages.imported import import_weights as convert
    from maect.stages.run import RunConfig

    if options.weights.suffix == ".yaml":
        config = RunConfig.read(options.weights)
        if config.weights is None:
            raise UserError(f"{options.weights}: no `weights`: this run is not an import")
        run, side = options.weights.parent, config.encoder.image_size
        layout, timm = (config.settings.model_dump().get(key) for key in ("layout", "timm"))
        given = config.weights, run, layout, config.size, side, config.encoder.pixels, timm
    elif options.run is None:
        raise UserError(f"{options.weights}: name the run's folder, too")
    else:
        run, timm = options.run, options.timm
        if timm is not None and (options.layout or options.size):
            raise UserError(f"--timm {timm} says everything: leave out --layout and --size")
        side = options.image_size
        given = options.weights, run, options.layout, options.size, side, Pixels(), timm
    layout, weights = convert(*given)
    what = weights.timm or f"layout {layout}, size {weights.size}"
    print(
        f"{run}: {what}, {weights.encoder.image_size} pixels, "
        f"pooling {weights.pooling}; {sum(weights.left_out.values())} tensors left out"
    )


def export(options: argparse.Namespace) -> None:
    """`maect export`."""
    from maect.answers.card import card_of
    from maect.models.export import export_run
    from maect.stages.run import resize_of

    need(options.run / "run.json", "finished run")
    resize = options.resize or resize_of(options.run)
    print(export_run(options.run, options.out, resize, card_of(options.run, options.licence)))


def publish(options: argparse.Namespace) -> None:
    """`maect publish`: the last step, which needs an account, is for the user."""
    from maect.answers.publish import publish as fill

    need(options.run / "run.json", "finished run")
    given = options.repository, options.licence, options.base_model, options.resize
    classes = fill(options.run, options.out, *given)
    what = f"a classifier of {classes} classes" if classes else "an encoder"
    print(f"{options.out}: {what}, ready for the hub")
    words = "hf", "upload", options.repository, str(options.out)
    print(f"Next: {shlex.join(words)}")


def features(options: argparse.Namespace) -> None:
    """`maect features`."""
    from maect.tools import jobs

    jobs.extract_features(
        options.run,
        options.shards,
        options.out,
        where_to_run(options),
        precision=options.precision,
        resize=options.resize,
        norm=not options.before_norm,
        blocks=options.blocks,
    )


def embed(options: argparse.Namespace) -> None:
    """`maect embed`."""
    from maect import load
    from maect.answers.vectors import check_format, embed_into

    out = options.out or Path(f"{options.images.resolve().name}.parquet")
    check_format(out)
    encoder = load(options.run, options.device, options.precision)
    given = options.images, options.kind, options.batch_size, options.afresh
    made = embed_into(out, encoder, *given)
    for name, why in made.left_out.items():
        log.warning("%s: left out: %s", name, why)
    kept = f", {made.kept} of them kept from before" if made.kept else ""
    images = f"{counted(made.images, 'image')}{kept}, {len(made.left_out)} left out"
    print(f"{out}: {images}; {made.width} numbers each")
    if encoder.could_be_faster(made.images - made.kept):
        print("This CPU has bfloat16: --precision bf16 takes about half the time")


def vectors_of(options: argparse.Namespace, encoder: "ImageEncoder") -> tuple["Vectors", str]:
    """Vectors of the images that can be read, and how many; the others are named in the log."""
    from maect.answers.vectors import embed as vectors

    found, left_out = vectors(encoder, options.images, options.kind, options.batch_size)
    for name, why in left_out.items():
        log.warning("%s: left out: %s", name, why)
    return found, f"{counted(len(found.files), 'image')}, {len(left_out)} left out"


def cluster(options: argparse.Namespace) -> None:
    """`maect cluster`."""
    from maect.answers.clusters import write_clusters
    from maect.answers.vectors import Vectors
    from maect.evaluate.clusters import cluster as group

    vectors = Vectors.read(options.index)
    vectors.source(options.images)  # before the work
    clusters = group(vectors.values, options.groups, options.method, options.smallest)
    write_clusters(vectors, clusters, options.out, options.images)
    if clusters.grains:
        print(f"also possible: {', '.join(map(str, clusters.grains))} groups (--groups N)")
    print(f"{options.out}: {clusters.count} groups; open {options.out / 'index.html'}")


def audit(options: argparse.Namespace) -> None:
    """`maect audit`."""
    from maect.answers.audit import audit as find_pairs
    from maect.answers.audit import open_splits, write_audit
    from maect.core.files import read_json, write_record
    from maect.experiment.pages import AUDIT

    run = options.run.absolute()
    splits = open_splits(run, options.dataset)
    pairs = find_pairs(splits, options.threshold, options.within)
    out = options.out or run.parents[1] / "audits" / run.name
    write_audit(run.name, pairs, splits, options.threshold, out)
    if options.out is None:
        digests = {split.name: split.index.digest for split in splits}
        found = {"splits": digests, "pairs": read_json(out / "pairs.json")}
        write_record(run.parents[1] / AUDIT, found)
    count, exact = counted(len(pairs), "pair"), sum(pair.exact for pair in pairs)
    print(f"{out}: {count}, {exact} of equal files; open {out / 'index.html'}")


def duplicates(options: argparse.Namespace) -> None:
    """`maect duplicates`."""
    from maect.answers.duplicates import duplicates as find

    found = find(options.what, options.out, options.images, options.count)
    print(f"{options.out}: {found}; open {options.out / 'index.html'}")


def sort(options: argparse.Namespace) -> None:
    """`maect sort`."""
    from maect.answers.sort import sort_images

    counts = sort_images(options.table, options.images, options.out, options.link)
    for group, count in counts.items():
        print(f"{count:6d}  {options.out / group}")


def search(options: argparse.Namespace) -> None:
    """`maect search`."""
    from maect import load
    from maect.answers.vectors import Vectors, nearest

    index = Vectors.read(options.index)
    encoder = load(options.run, options.device, index.about.get("precision", "fp32"))
    index.check(encoder, options.index)
    similarities, found = nearest(index, encoder.encode(options.image), options.count)
    for image, near, numbers in zip(options.image, similarities, found, strict=True):
        if len(options.image) > 1:
            print(image)
        for similarity, number in zip(near, numbers, strict=True):
            print(f"{similarity:.4f}  {index.files[number]}")


def predict(options: argparse.Namespace) -> None:
    """`maect predict`."""
    from maect import load
    from maect.answers.classes import (
        classifier_of,
        fit_classifier,
        read_classifier,
        write_classes,
    )
    from maect.answers.vectors import check_format

    check_format(options.out, (".csv",))
    path = options.classifier or classifier_of(options.run)
    if options.labelled is not None:
        if options.classifier is None:
            raise UserError("--labelled: name the file to keep the classifier in with --classifier")
        classifier = fit_classifier(options.labelled)
    else:
        classifier = read_classifier(path)
    # Evaluations may resize images otherwise than the run says: they are of another data set.
    encoder = load(options.run, options.device, resize=classifier.resize)
    classifier.check(encoder, path)
    vectors, images = vectors_of(options, encoder)
    if options.labelled is not None:
        classifier.write(path)
    write_classes(vectors, classifier, options.out)
    print(f"{options.out}: {images}; {len(classifier.class_names)} classes")


def compare(options: argparse.Namespace) -> None:
    """`maect compare`: prints k-NN and logistic regression; the rest is on the page."""
    from maect.tools import comparison
    from maect.tools.compare import compare as measure
    from maect.tools.compare import named

    encoders, images = named(options.encoders, "encoders"), named(options.images, "folders")
    matrix = measure(
        encoders,
        images,
        options.out,
        options.device,
        options.threads,
        real_labels=options.real_labels,
    )
    frame = comparison.write_comparison(matrix, options.out)
    print(comparison.summary(frame))
    print(f"{options.out}: open {options.out / 'index.html'}")


def evaluate(options: argparse.Namespace) -> None:
    """`maect evaluate`."""
    from maect.evaluate import EvaluationConfig
    from maect.tools import jobs

    before = EvaluationConfig.read(options.config)
    config = EvaluationConfig.read(options.config, options.changes)
    if before.settings.inputs() != config.settings.inputs() and before.inputs == config.inputs:
        raise UserError(
            f"{options.config}: {' '.join(options.changes)} asks for other inputs; "
            "name the files with inputs.NAME=PATH"
        )
    config, path = read_changed(EvaluationConfig, options)
    jobs.evaluate(config, path, where_to_run(options))


def page(options: argparse.Namespace) -> None:
    """`maect page`."""
    from maect.experiment.pages import make_page

    make_page(options.config)


def show(options: argparse.Namespace) -> None:
    """`maect show`."""
    from maect.report.render import show as tables

    tables(options.root)


def verify(options: argparse.Namespace) -> int:
    """`maect verify`: 0 if all cells agree."""
    from maect.tools.verify import verify as compare

    def run(experiment: Path, targets: list[str]) -> int:
        return snakemake(str(experiment), options.profile, (), targets)

    need(options.published, "published results")
    return compare(options.published, options.cells, options.out, run, options.seed)


def leaderboard(options: argparse.Namespace) -> None:
    """`maect leaderboard`."""
    from maect.tools.leaderboard import leaderboard as rows

    for run in options.runs:
        need(run, "run")
    print(rows(options.runs, options.out), end="")
    print(f"{options.out}: fill in family and pretrain before you send the rows", file=sys.stderr)


def clean(options: argparse.Namespace) -> None:
    """`maect clean`."""
    from maect.tools.clean import clean as free

    free(need(options.root, "results folder"), options.remove)


def status(options: argparse.Namespace) -> None:
    """`maect status`: every run, evaluation and cluster job of a results folder."""
    from maect.tools.status import show as show_status

    roots = options.root or sorted({path.parent for path in Path("results").glob("*/runs")})
    if not roots:
        raise UserError("results: no experiment has started here; name its results folder")
    for root in roots:
        try:
            show_status(root)
        except UserError:
            if options.root:
                raise
            print(f"{root}: no run has started yet")


def sync(options: argparse.Namespace) -> None:
    """`maect sync`: only what is new."""
    from maect.tools.sync import sync as copy

    count = copy(options.service, options.run, options.project)
    print(f"{options.run}: {count} new steps to {options.service}")


def new_experiment(options: argparse.Namespace) -> None:
    """`maect new-experiment`: prints what it wrote, with the reasons, and what to run next."""
    from maect.tools.new_experiment import new_experiment as write
    from maect.tools.new_experiment import outlook, without_training
    from maect.tools.speed import this_machine

    machine = this_machine()
    text = write(
        options.images,
        options.out,
        options.from_public,
        machine if options.quick else None,
        ignore_folders=options.ignore_folders,
        skip_unreadable=options.skip_unreadable,
    )
    print(text)
    print(*outlook(options.out, machine), *without_training(options.out), sep="\n")
    print(f"Next: {own_name()} run {shlex.quote(str(options.out))} -n")


def plan(options: argparse.Namespace) -> None:
    """`maect plan`: what is left to run, what it takes, and how long the longest chain is."""
    from maect import experiment
    from maect.experiment.profile import find_profile
    from maect.tools import neighbors
    from maect.tools.dry_run import jobs_to_run
    from maect.tools.plan import Device, all_here, lines, make_plan, missing

    for target in options.target:
        if target in experiment.names() or target.endswith((".yaml", ".yml")):
            raise UserError(f"{target} is an experiment, not a target: --experiment {target}")
    chosen = experiment.load(options.experiment, **changes_of(options.config))
    config = [f"experiment={options.experiment}", *options.config]
    left = jobs_to_run(options.target, config, find_profile(options.profile))
    known = (str(job.resources.get("gpu") or "") for job in left)
    name = options.device or ("here" if all_here(left) else next(filter(None, known), "A100"))
    device = Device(name, options.utilisation)
    if name == "here":
        from maect.tools.speed import busy, this_machine

        device = this_machine()
    planned = lines(make_plan(left, chosen, device)) + (busy() if name == "here" else [])
    print(f"{options.experiment} on {options.profile}", *planned, sep="\n")
    for fault in missing(left, chosen):
        print(f"missing: {fault}")
    for warning in neighbors.warnings(chosen):
        print(f"warning: {warning}")


def doctor(options: argparse.Namespace) -> None:
    """`maect doctor`: whether a site is ready, each fault with a hint."""
    from maect import experiment
    from maect.experiment.profile import find_profile
    from maect.tools.doctor import doctor as check

    profile = find_profile(options.profile)
    chosen = experiment.load(options.experiment, **changes_of(options.config))
    check(chosen, profile, not options.no_job)
