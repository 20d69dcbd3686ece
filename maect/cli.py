"""The `maect` command: its options, its log and its exit status."""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maect import __version__, commands
from maect.core.errors import UserError
from maect.core.log import command_log
from maect.data.sources import SOURCES
from maect.report import commands as reports
from maect.tools.doctor import command as doctor_command
from maect.tools.plan import command as plan_command

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 2 wrong input, 130 interrupted."""
    options = build_parser().parse_args(arguments)
    with command_log(getattr(options, "log", None)):
        try:
            options.call(options)
        except UserError as error:
            log.error("maect %s: %s", options.command, error)
            return 2
        except KeyboardInterrupt:
            log.error("maect %s: interrupted", options.command)
            return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(prog="maect", description="MAE-CT, from images to tables.")
    parser.add_argument("--version", action="version", version=f"maect {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, call: Any, help: str, *parents: Any) -> argparse.ArgumentParser:
        sub = subparsers.add_parser(name, help=help, description=help, parents=list(parents))
        sub.set_defaults(call=call)
        return sub

    launching = launch_options()

    shard = command(
        "shard", commands.shard, "Write an image folder as webdataset tars with an index."
    )
    shard.add_argument("source", type=Path, help="the images: a folder or archive of that kind")
    shard.add_argument("out", type=Path, help="folder of the shards; its name names the split")
    shard.add_argument(
        "--kind",
        default="folder",
        help="what SOURCE is (docs/data.md; folder by default): "
        + "; ".join(f"{kind}: {source.about}" for kind, source in SOURCES.items()),
    )
    shard.add_argument("--shards", type=int, default=1, help="number of tars (default 1)")
    shard.add_argument("--labels", type=Path, help="labels of the source, for kinds that need them")
    shard.add_argument("--exclude", type=Path, help="file of image names to leave out, one a line")
    shard.add_argument("--shorter-side", type=int, help="recompress larger images to this side")
    shard.add_argument("--classes", help="for a view: dogs15, or a file of class names, one a line")
    shard.add_argument("--only", help="one step: plan, a shard's number, or index")
    shard.add_argument("--verify", action="store_true", help="check shards that were written")

    retrieve = command("retrieve", commands.retrieve, "Bring data from outside the cluster.")
    retrieve.add_argument("what", help="digits, or what docs/data.md lists")
    retrieve.add_argument("out", type=Path, help="folder to put it in")

    for name, stage, help in (
        ("pretrain", "pretrain", "Pre-train a masked autoencoder."),
        ("init-head", "head", "Train an NNCLR head on a frozen encoder."),
        ("tune", "tune", "Contrastive tuning of an encoder."),
    ):
        sub = command(name, commands.train, help, launching)
        sub.set_defaults(stage=stage)
        sub.add_argument("folder", type=Path, help="the run's folder; resumed if it has a state")
        sub.add_argument("--shards", type=Path, required=True, help="shards of the train split")
        sub.add_argument("--from", dest="source", type=Path, help="folder of the run to start from")
        sub.add_argument("--recipe", required=True)
        sub.add_argument("--size", required=True, help="encoder size, a column of the recipe")
        sub.add_argument("--image-size", type=int)
        sub.add_argument("--seed", type=int, default=0)
        sub.add_argument("--save-every-minutes", type=float, default=10.0)
        sub.add_argument(
            "--convert-world-size", action="store_true", help="resume on another number of ranks"
        )
        sub.add_argument(
            "--stage-to", metavar="DIR", help="copy the shards to this folder of each node first; "
            "or the name of the node's environment variable that holds it (TMPDIR)",
        )  # fmt: skip
        add_settings(sub)

    imported = command("import", commands.import_weights, "Turn public weights into a run.")
    imported.add_argument("weights", type=Path, help="a checkpoint, as published")
    imported.add_argument("run", type=Path, help="the run's folder")
    imported.add_argument("--layout", help="one of docs/weights.md; found if not given")
    imported.add_argument("--size", help="encoder size; found if not given")
    imported.add_argument("--image-size", type=int, help="to use it at; its own if not given")

    export = command("export", commands.export, "Write an encoder for timm and the hub.")
    export.add_argument("run", type=Path, help="folder of the run")
    export.add_argument("out", type=Path, help="folder to write to")

    features = command("features", commands.features, "Extract an encoder's features.", launching)
    features.add_argument("run", type=Path, help="folder of the run")
    features.add_argument("--shards", type=Path, required=True)
    features.add_argument("--out", type=Path, required=True)
    features.add_argument("--resize", type=int, help="shorter side before the centre crop")

    evaluate = command("evaluate", commands.evaluate, "Evaluate an encoder.", launching)
    evaluate.add_argument("protocol")
    evaluate.add_argument("run", type=Path, help="folder of the run")
    evaluate.add_argument("--out", type=Path, required=True, help="JSON file of the result")
    for name in ("train-features", "test-features", "train-shards", "test-shards"):
        evaluate.add_argument(f"--{name}", type=Path)
    evaluate.add_argument("--probe", type=Path, help="classifier that linear_probe left")
    evaluate.add_argument("--clusters", type=Path, help="clusters that clustering left")
    evaluate.add_argument(
        "--split", action="append", default=[], metavar="NAME=SHARDS", help="a further split"
    )
    evaluate.add_argument("--resize", type=int, help="shorter side before the centre crop")
    add_settings(evaluate)

    for name, call, help in (
        ("table", reports.table_of, "Build one of the paper's tables."),
        ("figure", reports.figure_of, "Draw one of the paper's figures."),
    ):
        sub = command(name, call, help)
        sub.add_argument("name")
        sub.add_argument("out", type=Path, nargs="+")
        sub.add_argument("--evaluations", type=Path, required=True)
        sub.add_argument("--row", action="append", default=[], metavar="ARCH:METHOD:RUN[,RUN]")
        sub.add_argument(
            "--no-paper", action="store_true", help="without the paper's numbers: of other images"
        )
        if name == "figure":
            sub.add_argument("--classes", type=Path, help="index.json that names the classes")

    claims = command("claims", reports.claims_of, "Hold the paper's statements against the tables.")
    claims.add_argument("out", type=Path, nargs="+", help="claims.csv, claims.html")
    claims.add_argument("--tables", type=Path, nargs="+", required=True, help="CSV files")
    claims.add_argument("--runs", type=Path, required=True, help="folder of the runs, for the cost")
    claims.add_argument("--row", action="append", default=[], metavar="ARCH:METHOD:RUN[,RUN]")

    status = command("status", commands.status, "Print what every run of an experiment is doing.")
    status.add_argument("root", type=Path, nargs="*", help="results folder; default: results/*")

    new = command(
        "new-experiment", commands.new_experiment, "Write an experiment for your own images."
    )
    new.add_argument(
        "--images", type=Path, required=True,
        help="CLASS/IMAGE, or images without classes; either of it also below train/ and val/",
    )  # fmt: skip
    new.add_argument("--out", type=Path, required=True, help="the experiment to write, .yaml")
    new.add_argument(
        "--from-public", help="start from public weights: mae_base, mae_large or mae_huge14"
    )

    plan = command("plan", plan_command.plan, "Print what is left to run and what it takes.")
    plan.set_defaults(parser=parser)
    plan.add_argument("target", nargs="*", help="as Snakemake's; default: the whole report")
    plan.add_argument("--experiment", default="paper", help="name or path")
    plan.add_argument("--profile", type=Path, default=Path("cluster_profiles/local"))
    plan.add_argument("--config", nargs="+", default=[], metavar="KEY=VALUE", help="Snakemake's")
    plan.add_argument("--device", default="A100", help="where nothing is measured: A100, H100, cpu")
    plan.add_argument("--utilisation", type=float, default=0.35, help="of its peak (default 0.35)")

    doctor = command(
        "doctor", doctor_command.doctor, "Check a site before anything is spent on it."
    )
    doctor.add_argument("--experiment", default="paper", help="whose storage is checked")
    doctor.add_argument("--profile", type=Path, default=Path("cluster_profiles/local"))
    doctor.add_argument("--no-job", action="store_true", help="only what needs no job")

    show = command("show", reports.show, "Print the tables of a results folder.")
    show.add_argument("root", type=Path, help="such as results/digits")
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """`--set KEY=VALUE`, any number of times, with dots for nested keys."""
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE",
        help="change a setting, e.g. --set epochs=10 --set head.topk=1",
    )  # fmt: skip


def launch_options() -> argparse.ArgumentParser:
    """Where and how to run; no part of a result's identity."""
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group("where to run")
    group.add_argument("--cluster", choices=["local", "slurm"], default="local")
    group.add_argument(
        "--nodes", default="1", help="1..16 lets a training take as many as its batch is worth"
    )
    group.add_argument(
        "--devices", default="1", help="ranks a node; auto or gpus: its GPUs; on a CPU 2 or 1"
    )
    group.add_argument("--cpus", default="auto", help="CPUs a rank (auto: all, shared out)")
    group.add_argument("--memory-mb", type=int, default=0, help="memory a node (0: do not say)")
    group.add_argument("--minutes", type=int, default=1440, help="wall limit of one job")
    group.add_argument("--partition", default="")
    group.add_argument("--account", default="")
    group.add_argument("--sbatch", default="", help="more sbatch arguments, KEY=VALUE,KEY=VALUE")
    group.add_argument("--setup", default="", help="script to source on the compute node")
    group.add_argument("--detach", action="store_true", help="leave the job running on Ctrl-C")
    group.add_argument("--log", help="also write messages to this file")
    return parent
