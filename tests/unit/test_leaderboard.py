"""Rows and logs of the leaderboard, from evaluations of a small encoder of digits."""

import csv
import runpy
import shutil
from pathlib import Path

import pytest
from evaluate.conftest import Rank, images, resolved
from evaluate.test_lars_probes import EFFICIENT
from evaluate.test_lars_probes import SETTINGS as LINEAR

from maect.core.errors import UserError
from maect.core.files import seek_record
from maect.evaluate import load_evaluation
from maect.evaluate.base import EvaluationJob
from maect.evaluate.evaluation import evaluate
from maect.evaluate.features import extract
from maect.models.weights import load_encoder_weights, save_encoder

__all__ = ["images"]  # a fixture

SCRIPT = Path(__file__).parents[2] / "docs/results/leaderboard.py"
leaderboard = runpy.run_path(str(SCRIPT))["leaderboard"]


@pytest.fixture(scope="module")
def evaluated(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with the runs `cls` and `mean`, by what the file says of their pooling."""
    root = tmp_path_factory.mktemp("results")
    encoder, settings, _ = load_encoder_weights(images / "runs" / "mae" / "encoder.safetensors")
    shards = {"train": images / "shards" / "train", "test": images / "shards" / "val"}
    for pooling in ("cls", "mean"):
        run, out = (root / part / pooling for part in ("runs", "evaluations"))
        for folder in (run, out):
            folder.mkdir(parents=True)
        save_encoder(run / "encoder.safetensors", encoder.state_dict(), settings, pooling)
        for probe in (LINEAR.model_copy(update={"held_out": 0.2}), EFFICIENT):
            job = EvaluationJob(run, out / f"{probe.name}.json", shards, resize=16)
            assert evaluate(Rank(), config=resolved(job, probe)) == "done"
        for name in ("knn_leaderboard", "knn_leaderboard_final_norm"):
            knn = load_evaluation(name, "tiny")[1]
            features = {split: root / f"{pooling}-{name}-{split}.safetensors" for split in shards}
            for split, path in features.items():
                given = {"encoder": run / "encoder.safetensors", "shards": shards[split]}
                norm = knn.model_dump().get("norm", True)
                extract(Rank(), **given, out=path, resize=16, norm=norm)
            job = EvaluationJob(run, out / f"{name}.json", features)
            assert evaluate(Rank(), config=resolved(job, knn)) == "done"
    return root


def test_rows_and_logs_are_in_the_leaderboards_form(evaluated, tmp_path):
    runs = [evaluated / "runs" / name for name in ("cls", "mean")]
    assert leaderboard(runs, tmp_path) == (tmp_path / "results.csv").read_text()
    with (tmp_path / "results.csv").open() as file:
        reader = csv.DictReader(file)
        rows = {row["method"]: row for row in reader}
    # As in the first line of their file, August 2026.
    assert ",".join(reader.fieldnames or ()) == (
        "family,method,arch,pretrain,eval,image_size,lp,lp_gap,ep,ep_queries,ep_variant,model,"
        "loader,pretrain_tag,finetune,lp_variant,lp_log,ep_log,notes,verified,amp,waiting,"
        "gap_reason,knn,knn_k,knn_T,knn_log,extra_flags"
    )
    row, folder = rows["cls"], evaluated / "evaluations" / "cls"
    linear, efficient, raw, last = (
        seek_record(folder / f"{name}.json")["metrics"]
        for name in (
            "lars_linear_probe", "efficient_probe", "knn_leaderboard", "knn_leaderboard_final_norm"
        )
    )  # fmt: skip
    assert row["lp"] == f"{max(linear['by_epoch']):.2f}" and row["lp_gap"] == "no"
    assert row["ep"] == f"{max(efficient['by_epoch']):.2f}" and row["ep_queries"] == "4"
    assert (row["arch"], row["image_size"], row["lp_variant"]) == ("ViT-16x3/4", "16", "cls")
    assert row["family"] == row["pretrain"] == ""  # nobody can know
    assert "LP: epochs 3, batch_size 32, base_lr 160.0" in row["notes"]
    # The best of raw features and of those after the final norm, of every k and T.
    grid = [e for e in raw["sweep"] + last["sweep"] if not e["standardized"]]
    best = max(entry["accuracy"] for entry in grid)
    assert row["knn"] == f"{best:.2f}" and len(grid) == 2 * 6 * 3  # k 200 of 150 images
    chosen = float(row["knn"]), int(row["knn_k"]), float(row["knn_T"])
    assert chosen in [(float(f"{e['accuracy']:.2f}"), e["k"], e["temperature"]) for e in grid]
    # Beside what the test images choose, what held-out training images choose.
    tried = [entry for entry in grid if entry["held_out"] is not None]
    knn = max(tried, key=lambda entry: entry["held_out"])["accuracy"]
    assert f"k-NN chosen on held-out training images: {knn:.2f}" in row["notes"]
    chosen_epoch = linear["lars_linear_probe_held_out"]
    assert f"LP chosen on held-out training images: {chosen_epoch:.2f}" in row["notes"]
    assert "EP chosen" not in row["notes"]
    logs = {name: (tmp_path / f"logs/cls/{name}.txt").read_text() for name in ("lp", "ep", "knn")}
    assert f"\n2, , , , {linear['by_epoch'][2]:.2f}, \n" in logs["lp"]
    assert f"Max Accuracy: {row['ep']}%\n" in logs["ep"]
    assert logs["knn"].count("\nraw, ") == logs["knn"].count("\nfinal_norm, ") == 18
    assert f"\nBest: Top1 {row['knn']}% with " in logs["knn"]
    # Features of another kind than the linear probe reads are no k-NN of the leaderboard.
    assert rows["mean"]["knn"] == "" and not (tmp_path / "logs/mean/knn.txt").exists()
    assert "no k-NN: features pooled by mean, the linear probe reads cls" in rows["mean"]["notes"]
    assert rows["mean"]["lp"] == row["lp"]
    # It writes over no rows of others, nor over what was filled in.
    leaderboard(runs, tmp_path)
    table = tmp_path / "results.csv"
    filled = table.read_text() + "theirs,DINO\n"
    table.write_text(filled)
    with pytest.raises(UserError, match=r"results\.csv: has other methods, or cells that were"):
        leaderboard(runs, tmp_path)
    assert table.read_text() == filled
    table.unlink()
    leaderboard(runs[:1], tmp_path)
    leaderboard(runs, tmp_path)  # its own, and one more
    with pytest.raises(UserError, match="two runs of one name"):
        leaderboard([runs[0], runs[0]], tmp_path)
    run = tmp_path / "runs" / "cls"
    run.mkdir(parents=True)
    shutil.copy(runs[1] / "encoder.safetensors", run)
    with pytest.raises(UserError, match=r"lars_linear_probe\.json: no such result"):
        leaderboard([run], tmp_path / "out")
    shutil.copytree(folder, tmp_path / "evaluations" / "cls")
    with pytest.raises(UserError, match="of an encoder that cls no longer has"):
        leaderboard([run], tmp_path / "out")
