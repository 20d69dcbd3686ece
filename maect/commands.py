"""What each `maect` command does with its options; heavy modules are imported when needed."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from maect.core.errors import UserError
from maect.core.files import read_json, sha256_file


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """`["head.topk=1"]` as `{"head": {"topk": 1}}`."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator:
            raise UserError(f"--set {pair}: write KEY=VALUE")
        inner = values
        *parents, last = key.split(".")
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = yaml.safe_load(text)
    return values


def parse_splits(pairs: Sequence[str]) -> dict[str, Path]:
    """`["rotated=shards/rotated"]` as `{"rotated": Path("shards/rotated")}`."""
    for pair in pairs:
        if "=" not in pair:
            raise UserError(f"--split {pair}: write NAME=SHARDS")
    return {pair.partition("=")[0]: Path(pair.partition("=")[2]) for pair in pairs}


def launch(
    options: argparse.Namespace,
    place: Path,
    task: str,
    is_done: Callable[[], bool],
    **arguments: Any,
) -> None:
    """Run a function on every rank, as the options say, until what it was asked for is there."""
    from maect.launch import Resources, Task
    from maect.launch import launch as launch_task
    from maect.launch.devices import count_devices
    from maect.tools.plan.nodes import fixed_nodes

    if options.account.startswith("$"):
        raise UserError(f"--account {options.account}: this variable is not set; export it")
    devices = count_devices(options.devices)
    if options.cluster == "slurm" and options.cpus == "auto":
        raise UserError("--cpus auto is for this machine; say how many CPUs a rank has there")
    cores = len(os.sched_getaffinity(0))
    resources = Resources(
        cluster=options.cluster,
        nodes=fixed_nodes(options.nodes),
        devices=devices,
        cpus=max(1, cores // devices) if options.cpus == "auto" else int(options.cpus),
        memory_gb=-(-options.memory_mb // 1024) or None,
        minutes=options.minutes,
        partition=options.partition or None,
        account=options.account or None,
        sbatch=tuple(part for part in options.sbatch.split(",") if part),
        setup=os.path.abspath(options.setup) if options.setup else None,
    )
    launch_task(
        Task(task, arguments), place, resources,
        is_done=is_done, describe=f"{options.command} {place.stem}", detach=options.detach,
    )  # fmt: skip


def need(path: Path, what: str) -> Path:
    """`path`, if it exists."""
    if not path.exists():
        raise UserError(f"{path}: no such {what}")
    return path


def shard(options: argparse.Namespace) -> None:
    """`maect shard`: everything, or one step so that a pipeline can run them as separate jobs."""
    from maect.data import shards
    from maect.data.sources import find_source
    from maect.data.sources.view import read_classes
    from maect.data.subsets import class_view

    threads = len(os.sched_getaffinity(0))
    how = {
        "labels": options.labels,
        "exclude": options.exclude,
        "shorter_side": options.shorter_side,
    }
    if options.verify:
        print(f"{options.out}: {shards.verify(options.out, threads=threads)} samples, all sound")
    elif not find_source(options.kind).sharded:
        if not options.classes:
            raise UserError(f"--kind {options.kind}: say which classes with --classes")
        count = class_view(options.source, options.out, read_classes(options.classes))
        print(f"{options.out}: {count} samples of {options.source}")
    elif options.only == "plan":
        shards.plan_shards(options.source, options.kind, options.out, options.shards, **how)
    elif options.only == "index":
        shards.finish_index(options.out)
    elif options.only:
        if not options.only.isdecimal():
            raise UserError(f"--only {options.only}: plan, a shard's number, or index")
        shards.write_shard(options.out, int(options.only), threads=1)
    else:
        count = shards.shard(
            options.source, options.out, options.kind, options.shards, threads=threads, **how
        )
        print(f"{options.out}: {count} samples")


def retrieve(options: argparse.Namespace) -> None:
    """`maect retrieve`."""
    if options.what == "digits":
        from maect.data.digits import write_digits

        write_digits(options.out)
        return
    from maect.data.retrieve import retrieve as fetch

    for path in fetch(options.what, options.out):
        print(path)


def train(options: argparse.Namespace) -> None:
    """`maect pretrain`, `init-head` and `tune`: check everything, then run on the devices."""
    from maect.launch.devices import count_devices
    from maect.recipes import load_encoder
    from maect.stages import load_recipe
    from maect.tools.plan.nodes import training_nodes
    from maect.train.record import fingerprint, is_finished

    settings = load_recipe(options.recipe, options.size, parse_settings(options.overrides))
    encoder = load_encoder(options.size, options.image_size)
    need(options.shards / "index.json", "index of shards (make it with maect shard)")
    if options.source is not None:
        need(options.source / "run.json", "finished run")
    nodes = training_nodes(options.nodes, count_devices(options.devices), settings, encoder)
    options.nodes = str(nodes)
    identity = fingerprint(
        options.stage, settings, encoder, options.seed,
        read_json(options.shards / "index.json")["digest"], options.source,
    )  # fmt: skip
    launch(
        options,
        options.folder,
        "maect.train.run:train",
        lambda: is_finished(options.folder, identity),
        folder=str(options.folder.absolute()),
        shards=str(options.shards.absolute()),
        stage=options.stage,
        settings=settings.model_dump(mode="json"),
        encoder=encoder.model_dump(mode="json"),
        seed=options.seed,
        source=str(options.source.absolute()) if options.source else None,
        save_every_minutes=options.save_every_minutes,
        convert_world_size=options.convert_world_size,
        stage_to=options.stage_to or None,
    )


def import_weights(options: argparse.Namespace) -> None:
    """`maect import`."""
    from maect.train.imported import import_weights

    layout, found = import_weights(
        options.weights, options.run, options.layout, options.size, options.image_size
    )
    print(
        f"{options.run}: layout {layout}, size {found.size}, {found.encoder.image_size} pixels, "
        f"pooling {found.pooling}; {sum(found.left_out.values())} tensors left out"
    )


def export(options: argparse.Namespace) -> None:
    """`maect export`."""
    from maect.models.export import export_run

    need(options.run / "run.json", "finished run")
    print(export_run(options.run, options.out))


def features(options: argparse.Namespace) -> None:
    """`maect features`."""
    encoder = need(options.run / "encoder.safetensors", "encoder")
    need(options.shards / "index.json", "index of shards (make it with maect shard)")
    wanted = {
        "encoder_sha256": sha256_file(encoder),
        "index_digest": read_json(options.shards / "index.json")["digest"],
    } | ({"resize": options.resize} if options.resize else {})

    def is_done() -> bool:
        from maect.evaluate.store import open_record

        return options.out.exists() and wanted.items() <= open_record(options.out).items()

    launch(
        options,
        options.out.with_suffix(".job"),
        "maect.evaluate.features:extract",
        is_done,
        encoder=str(encoder.absolute()),
        shards=str(options.shards.absolute()),
        out=str(options.out.absolute()),
        resize=options.resize,
    )


def evaluate(options: argparse.Namespace) -> None:
    """`maect evaluate`."""
    from pydantic import ValidationError

    from maect.core.settings import one_line
    from maect.evaluate import PROTOCOLS, Features, Shards
    from maect.evaluate.config import EvaluationConfig
    from maect.evaluate.fine_tune_settings import FineTune
    from maect.evaluate.run import is_finished
    from maect.launch.devices import count_devices
    from maect.tools.plan.nodes import fixed_nodes

    if options.protocol not in PROTOCOLS:
        raise UserError(f"unknown protocol {options.protocol!r}; known: {', '.join(PROTOCOLS)}")
    try:
        values = PROTOCOLS[options.protocol].model_validate(parse_settings(options.overrides))
    except ValidationError as error:
        raise one_line(error, options.protocol) from None
    if isinstance(values, FineTune):
        values.check_ranks(fixed_nodes(options.nodes) * count_devices(options.devices))
    need(options.run / "encoder.safetensors", "encoder")
    left = {"probe": options.probe, "clusters": options.clusters}
    shards = {"train": options.train_shards, "test": options.test_shards}
    shards |= {"images": options.test_shards} | parse_splits(options.split)
    features = {"train": options.train_features, "test": options.test_features}
    inputs: dict[str, Path | list[Path]] = {}
    for name, kind in values.inputs().items():
        given = features if isinstance(kind, Features) else left
        given = shards if isinstance(kind, Shards) else given
        path = given.get(name)
        if path is None:
            raise UserError(f"{options.out.stem}: lacks the input {name!r}")
        inputs[name] = need(path, name)
    told = EvaluationConfig(
        evaluation=options.out.stem,
        protocol=options.protocol,
        run=options.run,
        resize=options.resize,
        inputs=inputs,
        settings=values,
    )
    config = options.out.with_suffix(".yaml")
    told.write(config)
    launch(
        options,
        options.out.with_suffix(".job"),
        "maect.evaluate.run:evaluate",
        lambda: is_finished(config),
        config=str(config.absolute()),
    )


def status(options: argparse.Namespace) -> None:
    """`maect status`: every run, evaluation and cluster job of a results folder."""
    from maect.tools.status import status as lines_about

    roots = options.root or sorted({path.parent for path in Path("results").glob("*/runs")})
    if not roots:
        raise UserError("results: no experiment has begun here; name its results folder")
    for root in roots:
        print(*lines_about(root), sep="\n")


def new_experiment(options: argparse.Namespace) -> None:
    """`maect new-experiment`: prints what it wrote, with the reasons, and how to go on."""
    from maect.tools.new_experiment import new_experiment as write

    print(write(options.images, options.out, options.from_public))
    print(f"Next: snakemake --profile cluster_profiles/local -n --config experiment={options.out}")
