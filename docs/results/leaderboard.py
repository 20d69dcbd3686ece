"""Write rows and logs for the leaderboard of frozen encoders, billpsomas/efficient-probing.

    python docs/results/leaderboard.py results/paper/runs/ct_aug_large [--out leaderboard]

Its `results.csv` has a line for each encoder, and a log for each number. Those are the best on the
test images; the notes say which numbers held-out training images choose. What no evaluation says
(family, data of the pre-training, losses, top 5) stays empty.
"""

import argparse
import csv
import io
import os
import sys
from pathlib import Path
from typing import Any

from maect.core.errors import UserError
from maect.core.files import fill_template, write_text
from maect.evaluate import load_evaluation
from maect.evaluate.base import encoder_checksum, encoder_settings
from maect.records import EvaluationRecord

COLUMNS = (
    "family", "method", "arch", "pretrain", "eval", "image_size", "lp", "lp_gap", "ep",
    "ep_queries", "ep_variant", "model", "loader", "pretrain_tag", "finetune", "lp_variant",
    "lp_log", "ep_log", "notes", "verified", "amp", "waiting", "gap_reason", "knn", "knn_k",
    "knn_T", "knn_log", "extra_flags",
)  # fmt: skip
LETTERS = {(384, 12): "S", (768, 12): "B", (1024, 24): "L", (1280, 32): "H"}
PROBES = {"lp": "lars_linear_probe", "ep": "efficient_probe"}
KNN = {"raw": "knn_leaderboard", "final_norm": "knn_leaderboard_final_norm"}
LOGS = Path(__file__).parent
"""Templates of the logs; of an epoch its accuracy on the test split alone is known."""
FIXED = ("epochs", "batch_size", "base_lr", "warmup_epochs", "weight_decay", "crop_scale", "flip")


def leaderboard(runs: list[Path], out: Path) -> str:
    """Write `results.csv` and `logs/RUN/{knn,lp,ep}.txt`, and return the rows.

    Args:
        runs: folders `results/EXPERIMENT/runs/RUN`, evaluated by `lars_linear_probe`,
            `efficient_probe` and `knn_leaderboard`.

    Raises:
        UserError: an evaluation is missing, damaged or of another encoder than the run has, two
            runs have the same name, or the `results.csv` has other methods or cells filled in.
    """
    names = [Path(os.path.abspath(run)).name for run in runs]
    if len({*names}) < len(names):
        raise UserError(f"{', '.join(names)}: two runs of one name; write them to two folders")
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    files = dict[str, str]()
    for name, run in zip(names, runs, strict=True):
        row, logs = _row(name, Path(os.path.abspath(run)))
        writer.writerow(row)
        files |= logs
    _check_results(out / "results.csv", text.getvalue())
    for file, content in (files | {"results.csv": text.getvalue()}).items():
        write_text(out / file, content)
    return text.getvalue()


def _check_results(path: Path, text: str) -> None:
    """Refuse to lose rows of other methods, and cells that somebody filled in (UserError)."""
    if not path.exists():
        return
    new = {row["method"]: row for row in csv.DictReader(io.StringIO(text))}
    old = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8", errors="replace")))
    for row in old:
        of = new.get(row.get("method") or "", {})
        if any(value and not of.get(column) for column, value in row.items()):
            raise UserError(
                f"{path}: has other methods, or cells that were filled in; choose another --out"
            )


def _row(name: str, run: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The row of a run, and its logs by their paths."""
    encoder, folder = encoder_settings(run), run.parents[1] / "evaluations" / name
    sha256 = encoder_checksum(run)
    read = "cls" if encoder.class_token else "mean"
    shape = encoder.width, encoder.depth
    letter = LETTERS.get(shape) or "{}x{}".format(*shape)
    row: dict[str, Any] = {
        "method": name,
        "arch": f"ViT-{letter}/{encoder.patch_size}",
        "image_size": encoder.image_size,
        "lp_gap": "no" if encoder.class_token else "yes",
        "gap_reason": "" if encoder.class_token else "no_cls",
        "ep_variant": "ep",
        "lp_variant": "cls" if encoder.class_token else "pos",
        "model": name,
        "loader": "unsupported:maect",
    }
    logs: dict[str, str] = {}
    notes = []
    for column, evaluation in PROBES.items():
        result = _result(folder, evaluation, sha256)
        settings, values = result.settings, result.metrics["by_epoch"]
        path = f"logs/{name}/{column}.txt"
        row |= {column: f"{max(values):.2f}", f"{column}_log": path}
        usual = load_evaluation(evaluation, "large")[1].model_dump(mode="json")
        other = [f"{key} {settings[key]}" for key in FIXED if settings[key] != usual[key]]
        notes += [f"{column.upper()}: {', '.join(other)}"] if other else []
        if f"{evaluation}_held_out" in result.metrics:
            notes.append(_chosen(column.upper(), result.metrics[f"{evaluation}_held_out"]))
        logs[path] = fill_template(
            LOGS / "probe_log.txt.j2", row=row, variant=row[f"{column}_variant"],
            settings=settings, values=values,
        )  # fmt: skip
    row["ep_queries"] = settings["queries"]
    grid = []
    for features, evaluation in KNN.items():
        # Of a mean of patches the leaderboard norms the mean, as no evaluation here does.
        there = (folder / f"{evaluation}.json").exists() and encoder.class_token
        if features == "final_norm" and not there:
            continue
        result = _result(folder, evaluation, sha256)
        pooled = result.provenance["splits"]["train"]["pooling"].replace("fc_norm", "mean")
        if pooled != read:
            notes.append(f"no k-NN: features pooled by {pooled}, the linear probe reads {read}")
            break
        plain = [entry for entry in result.metrics["sweep"] if not entry["standardized"]]
        grid += [(features, e["temperature"], e["k"], e["accuracy"], e["held_out"]) for e in plain]
    if grid:
        features, temperature, k, best, _ = max(grid, key=lambda entry: entry[3])
        tried = [entry for entry in grid if entry[4] is not None]
        if tried:
            notes.append(_chosen("k-NN", max(tried, key=lambda entry: entry[4])[3]))
        path = f"logs/{name}/knn.txt"
        row |= {"knn": f"{best:.2f}", "knn_k": k, "knn_T": temperature, "knn_log": path}
        logs[path] = fill_template(LOGS / "knn_log.txt.j2", row=row, grid=grid, features=features)
    return row | {"notes": "; ".join(notes)}, logs


def _chosen(what: str, accuracy: float) -> str:
    """The note on a number that is not chosen on the test images, as those of the columns are."""
    return f"{what} chosen on held-out training images: {accuracy:.2f}"


def _result(folder: Path, evaluation: str, sha256: str) -> EvaluationRecord:
    """The result of an evaluation; UserError if it is missing, damaged or of another encoder."""
    path = folder / f"{evaluation}.json"
    if not path.exists():
        raise UserError(f"{path}: no such result; add {evaluation} to the experiment's `evaluate`")
    result = EvaluationRecord.read(path)
    if result.encoder_sha256 != sha256:
        raise UserError(f"{path}: of an encoder that {folder.name} no longer has; evaluate again")
    return result


def main() -> int:
    """Write the rows of the runs on the command line and print them; return the exit status."""
    parser = argparse.ArgumentParser(description="rows of evaluated runs for the leaderboard")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, default=Path("leaderboard"), help="folder to write to")
    given = parser.parse_args()
    try:
        print(leaderboard(given.runs, given.out), end="")
    except UserError as error:
        print(f"leaderboard.py: {error}", file=sys.stderr)
        return 2
    print(f"{given.out}: fill in family and pretrain before you send the rows", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
