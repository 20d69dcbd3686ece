"""Commands of whole experiments: write, run, look after, report, check."""

import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from maect.answers.commands import ENCODER, Device, Positive
from maect.core.errors import UserError
from maect.core.files import PIPELINE, need
from maect.core.owners import environment
from maect.data.commands import StatedPixels

log = logging.getLogger(__name__)

Name = Annotated[str, Parameter(help="name or path")]
Profile = Annotated[
    str, Parameter(help="name or folder of a cluster profile (default local: this machine)")
]
Config = Annotated[
    Sequence[str],
    Parameter(
        metavar="KEY=VALUE", help="change the experiment, as in seeds=3 (docs/experiments.md)"
    ),
]
Root = Annotated[Path, Parameter(help="such as results/digits")]
DEMO = (
    "protocols=knn,linear_probe,low_shot,clustering,umap",
    "tables=low_shot,clustering",
    "figures=umap,training_curves,reconstructions",
)
"""Part of the experiment `digits` that the demo computes."""


def run(
    experiment: Name,
    /,
    *words: Annotated[str, Parameter(allow_leading_hyphen=True, metavar="WORD")],
    profile: Profile = "local",
    config: Config = (),
) -> int:
    """Run an experiment, or resume it.

    Other words, such as a target, -n or --cores 4, are passed to Snakemake.

    `maect run digits --cores 2`

    Args:
        words: for Snakemake: targets and its options.
    """
    from maect.experiment import load
    from maect.experiment.resolve import targets

    chosen = load(experiment, **changes_of(config))
    for word in words:
        if word.startswith("-C") or word.partition("=")[0] == "--config":
            raise UserError(
                f"{word} as an option of Snakemake would be dropped; write --config KEY=VALUE, "
                "before --"
            )
    return snakemake(experiment, profile, config, targets(chosen, words))


def changes_of(pairs: Sequence[str]) -> dict[str, str]:
    """Parse `--config KEY=VALUE` into changes of an experiment."""
    for pair in pairs:
        if "=" not in pair:
            raise UserError(f"--config {pair}: write KEY=VALUE")
    return {pair.partition("=")[0]: pair.partition("=")[2] for pair in pairs}


def snakemake(
    experiment: str,
    profile: str,
    config: Sequence[str],
    arguments: Sequence[str] = (),
    log: Path | None = None,
) -> int:
    """Run Snakemake on the pipeline, wherever it is installed; returns its status.

    `config` has `KEY=VALUE` in place of what the experiment says. With `log` all lines go there,
    and the terminal has those of the logger plugin.
    """
    import psutil  # noqa: F401 (not first in a signal's handler: a second signal finds half of it)

    from maect.core.owners import check_working_folder
    from maect.experiment.profile import find_profile

    check_working_folder()
    # Without this Snakemake would also take `default` or `profiles/default` for a profile.
    own = any(word.startswith("--workflow-profile") for word in arguments)
    words = [
        sys.executable, "-P", "-m", "maect.tools.start_snakemake",
        "--snakefile", PIPELINE / "Snakefile",
        *arguments, "--profile", find_profile(profile) / "config.yaml",
        *(() if own else ("--workflow-profile", "none")),
    ]  # fmt: skip
    asked = ["--config", f"experiment={experiment}", *config]
    if log is None:
        process = subprocess.Popen([*words, *asked], env=environment())
    else:
        log.parent.mkdir(parents=True, exist_ok=True)
        terminal = os.dup(2)
        words += ["--logger", "maect", "--logger-maect-terminal", str(terminal)]
        with open(log, "ab") as file:
            process = subprocess.Popen(
                [*words, *asked], env=environment(), stdout=file, stderr=file, pass_fds=[terminal]
            )
        os.close(terminal)
    # Ctrl-C reaches it, too: it lets the trainings save, which takes its time. `kill` reaches this
    # process alone, and would leave all others to themselves.
    handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: _interrupt(process.pid)}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        status = process.wait()
        return 128 - status if status < 0 else status  # by a signal: as a shell says it
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(pid: int) -> None:
    """Interrupt a process and its descendants in this process group, as Ctrl-C would."""
    import psutil

    with suppress(psutil.Error):
        started = psutil.Process(pid)
        for one in (started, *started.children(recursive=True)):
            with suppress(psutil.Error, OSError):
                if os.getpgid(one.pid) == os.getpgrp():
                    one.send_signal(signal.SIGINT)


def demo() -> int:
    """Try the pipeline on handwritten digits."""
    from maect.experiment import load
    from maect.report.render import show as show_tables

    root = load("digits", **changes_of(DEMO)).root
    log_file = root / "logs/demo.log"
    print("The whole pipeline on 1,797 handwritten digits: three to six minutes on two idle cores.")
    print(f"What its jobs say is in {log_file}", flush=True)
    status = snakemake("digits", "local", DEMO, log=log_file)
    if status == 0:
        show_tables(root)
        print(f"Open {root / 'report.html'} in a browser.")
    return status


def resolve(experiment: Name, /, *, config: Config = ()) -> None:
    """Write the settings file of every job of an experiment.

    `maect resolve digits`
    """
    from maect.experiment import load
    from maect.experiment.resolve import files
    from maect.launch.owner import lock_folder

    # The pipeline writes the same files when it starts.
    chosen = load(experiment, **changes_of(config))
    given = list(files(chosen))
    with lock_folder(chosen.root, patience=0):  # the jobs of a pipeline would read other settings
        written = sum(config.write(path) for path, config in given)
    print(f"{chosen.root}: {len(given)} resolved files, {written} of them new or changed")


def compare(
    encoders: Annotated[
        Sequence[str], Parameter(metavar="ENCODER", help=f"{ENCODER}; or NAME=FOLDER")
    ],
    /,
    *,
    images: Annotated[Sequence[str], Parameter(metavar="FOLDER")],
    out: Path = Path("compared"),
    device: Device = None,
    threads: Positive | None = None,
    real_labels: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    geometry: bool = False,
    blocks: bool = False,
    pixels: StatedPixels = None,
) -> None:
    """Compare encoders on folders of images, without training.

    `maect compare results/birds/runs/mae results/birds/runs/ct_min --images photos`

    Args:
        images: CLASS/IMAGE, maybe below train/ and val/, or images without classes; an archive or a
            table; or NAME=FOLDER.
        out: folder of the tables, the page and the vectors, which are kept (default compared).
        threads: to compute with (default: one for each core that it may use).
        real_labels: ImageNet-ReaL's real.json: score ImageNet's validation images by it, too.
        geometry: also measure features that are centred, standardised or whitened, and without
            their first components.
        blocks: also recommend which block of each encoder to read, and how to pool it, chosen on
            held-out training images.
    """
    from maect.tools import block_choice, compare_page
    from maect.tools.compare import compare as measure
    from maect.tools.compare import named

    folders = named(encoders, "encoders"), named(images, "folders")
    matrix = measure(*folders, out, device, threads, real_labels, geometry, pixels)
    said = block_choice.recommended(matrix, out) if blocks else []
    frame = compare_page.write_comparison(matrix, out, said)
    print(compare_page.summary(frame), *said, sep="\n")
    print(f"{out}: open {out / 'index.html'}")


def page(config: Path, /) -> None:
    """Make one page of a report: a table, a figure, claims, data sets, images or summary.

    `maect page results/digits/tables/low_shot.yaml`

    Args:
        config: the resolved file.
    """
    from maect.experiment.pages import make_page

    make_page(config)


def status(root: Sequence[Path] = (), /, *, every: bool = False) -> None:
    """Show the state of every run.

    `maect status results/digits`

    Args:
        root: results folder; default: results/*.
        every: also list runs that have not started.
    """
    from maect.tools.status import show as show_status

    roots = root or sorted({path.parent for path in Path("results").glob("*/runs")})
    if not roots:
        raise UserError("results: no experiment has started here; name its results folder")
    for folder in roots:
        try:
            show_status(folder, every)
        except UserError:
            if root:
                raise
            print(f"{folder}: no run has started yet")


def new_experiment(
    *,
    images: Path,
    out: Path,
    from_public: str | None = None,
    quick: bool = False,
    ignore_folders: bool = False,
    skip_unreadable: bool = False,
    pixels: StatedPixels = None,
) -> None:
    """Write an experiment for your own images.

    `maect new-experiment --images photos --out birds.yaml --quick`

    Args:
        images: CLASS/IMAGE, or images without classes, either maybe below train/, val/ and test/;
            an archive or a table of images; or a folder of tars or tables (docs/data.md).
        out: the experiment to write, .yaml.
        from_public: start from public weights: mae_base, mae_large or mae_huge14.
        quick: fit it into about an hour on this machine: a smaller encoder, fewer epochs.
        ignore_folders: do not take folders for classes: use no labels.
        skip_unreadable: leave out images that cannot be read.
    """
    from maect.tools.new_experiment import new_experiment as write
    from maect.tools.new_experiment import outlook, without_training
    from maect.tools.speed import this_machine

    machine = this_machine()
    written = write(
        images, out, from_public, machine if quick else None,
        ignore_folders=ignore_folders, skip_unreadable=skip_unreadable,
        stated=pixels or {},
    )  # fmt: skip
    print(written)
    print(*outlook(out, machine), *without_training(out), sep="\n")
    print(f"Next: maect run {shlex.quote(str(out))} -n")


def tune(
    encoder: Annotated[str, Parameter(help=f"{ENCODER}; or a file of weights")],
    /,
    *,
    images: Path,
    hours: Annotated[float | None, Parameter(validator=Number(gt=0))] = None,
    by: Literal["tune", "refine", "diet"] = "tune",
    profile: Profile = "local",
    out: Path | None = None,
    ignore_folders: bool = False,
    skip_unreadable: bool = False,
    pixels: StatedPixels = None,
) -> int:
    """Make an encoder better on your own images, and tell whether it became better.

    The same command resumes it.

    `maect tune dinov2_small --images photos --hours 1`

    Args:
        images: CLASS/IMAGE, or images without classes, as for new-experiment.
        hours: that everything may take on this machine: image size, batch and epochs are chosen for
            it (default: as long as the images are worth).
        by: tune (contrastive), refine (MIM-Refiner) or diet (DIET-CP) (default tune).
        out: the experiment to write, .yaml (default IMAGES_ENCODER_BY.yaml, here).
        ignore_folders: do not take folders for classes: use no labels.
        skip_unreadable: leave out images that cannot be read.
    """
    from maect.experiment import load
    from maect.tools import tuning
    from maect.tools.speed import this_machine
    from maect.tools.tuned_encoder import find_start
    from maect.tools.tuning_result import conclude

    out = out or tuning.file_for(encoder, images, by)
    asked = {
        "by": by, "hours": hours, "ignore-folders": ignore_folders,
        "skip-unreadable": skip_unreadable, "pixels": pixels,
    }  # fmt: skip
    command = tuning.words_of(encoder, images, asked)
    if tuning.is_written_by(out, command):
        print(f"{out}: resuming")
    else:
        if hours is not None and profile != "local":
            raise UserError("--hours counts on this machine; leave it out with another --profile")
        how = {
            "ignore_folders": ignore_folders,
            "skip_unreadable": skip_unreadable,
            "stated": pixels or {},
        }
        device = this_machine()
        given = find_start(encoder), images, out, by, command, how, hours, device
        print(tuning.write_tuning(*given))
    chosen = load(str(out))
    if status := snakemake(str(out), profile, (), [tuning.TARGET]):
        return status
    print(*conclude(chosen, Path(encoder).name), sep="\n")
    return 0


def plan(
    target: Sequence[str] = (),
    /,
    *,
    experiment: Annotated[
        str | None,
        Parameter(help="name or path (default paper, where no experiment is in this folder)"),
    ] = None,
    profile: Profile = "local",
    config: Config = (),
    device: str | None = None,
    utilisation: Annotated[float, Parameter(validator=Number(gt=0, lte=1))] = 0.35,
) -> None:
    """Estimate what is left to run: jobs, hours, storage.

    `maect plan --experiment digits --profile juwels`

    Args:
        target: files or rules, as for Snakemake (default: the whole report).
        device: speed to assume where no run has measured it: A100, H100, cpu, or here, which
            measures a training step (default: here if jobs run on this machine, else the profile's
            GPU, or A100).
        utilisation: part of the device's peak speed that is reached (default 0.35).
    """
    from maect.experiment import load, names, own_experiments
    from maect.experiment.profile import find_profile
    from maect.experiment.resolve import targets
    from maect.tools.start_snakemake import import_snakemake

    import_snakemake()
    from maect.tools.dry_run import jobs_to_run
    from maect.tools.plan import Device, all_here, make_plan, missing
    from maect.tools.plan_text import lines

    for word in target:
        if word in names() or word.endswith((".yaml", ".yml")):
            raise UserError(f"{word} is an experiment, not a target: --experiment {word}")
    if experiment is None:
        if own := [file.name for file in own_experiments(Path())]:
            raise UserError(
                f"which experiment? here {'is' if len(own) == 1 else 'are'} {', '.join(own)}: "
                f"--experiment {own[0]}; or --experiment paper"
            )
        experiment = "paper"
    log.info("planning %s on %s", experiment, profile)
    chosen = load(experiment, **changes_of(config))
    asked = targets(chosen, target)
    left = jobs_to_run(asked, [f"experiment={experiment}", *config], find_profile(profile))
    known = (str(job.resources.get("gpu") or "") for job in left)
    name = device or ("here" if all_here(left) else next(filter(None, known), "A100"))
    machine = Device(name, utilisation)
    if name == "here":
        from maect.tools.speed import this_machine

        machine = this_machine()
    print(f"{experiment} on {profile}", *lines(make_plan(left, chosen, machine)), sep="\n")
    for fault in missing(left, chosen):
        print(f"missing: {fault}")


def doctor(
    *,
    experiment: Annotated[
        str, Parameter(help="name or path; its storage is checked (default paper)")
    ] = "paper",
    profile: Profile = "local",
    config: Config = (),
    no_job: bool = False,
) -> None:
    """Check whether this machine or cluster is ready.

    `maect doctor --profile juwels --experiment paper`

    Args:
        no_job: only the checks that need no job.
    """
    from maect.experiment import load
    from maect.experiment.profile import find_profile
    from maect.tools.doctor import doctor as check

    where = find_profile(profile)
    check(load(experiment, **changes_of(config)), where, not no_job)


def show(root: Root, /) -> None:
    """Print the tables of a results folder.

    `maect show results/digits`
    """
    from maect.report.render import show as tables

    tables(root)


def verify(
    published: Path,
    cells: Annotated[Sequence[str], Parameter(metavar="TABLE.METHOD.METRIC")] = (),
    /,
    *,
    out: Path = Path("verified"),
    seed: int | None = None,
    profile: Profile = "local",
) -> int:
    """Compute published numbers again, and compare them.

    Cells of tables, by name or drawn at random.

    `maect verify docs/results/digits low_shot.ct_min.knn`

    Args:
        published: such as docs/results/digits.
        cells: what to compute (default: ten cells at random).
        out: folder of the results (default verified).
        seed: of the random choice (default: another one each time).
    """
    from maect.tools.verify import verify as compare_cells

    def made(experiment: Path, targets: list[str]) -> int:
        return snakemake(str(experiment), profile, (), targets)

    need(published, "published results")
    return compare_cells(published, cells, out, made, seed)


def clean(root: Root, /, *, remove: bool = False) -> None:
    """List training states that are no longer needed, or remove them.

    `maect clean results/digits --remove`

    Args:
        remove: remove them; without it they are only listed.
    """
    from maect.tools.clean import clean as free

    free(need(root, "results folder"), remove)


def schema() -> None:
    """Print the JSON schema of experiment files, for editors.

    `maect schema > experiment.schema.json`
    """
    import json

    from maect.experiment.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
