import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from maect.core.errors import UserError
from maect.report.curves import POINTS, curve, training_curves
from maect.report.embedding import Panel, read_points, umap_figure
from maect.report.figures import umap
from maect.report.tables import Row


def colors_in(path: Path) -> set[str]:
    """Colours that occur in a picture, as hex."""
    with Image.open(path) as image:
        found = image.convert("RGB").getcolors(maxcolors=2**24)
    return {"#{:02X}{:02X}{:02X}".format(*color) for _, color in found}


def test_umap_panels(embedding, result, evaluations, tmp_path):
    for run in ("mae_tiny", "ct_min_tiny"):
        embedding(run)
        result(run, "clustering", accuracy=61.7)
    rows = [Row("tiny", "mae", ["mae_tiny"]), Row("tiny", "ct_min", ["ct_min_tiny", "x-s1"])]
    umap(
        [*rows, Row("tiny", "ct_aug", ["not_run"])],
        evaluations,
        tmp_path / "u.pdf",
        tmp_path / "u.png",
    )
    with Image.open(tmp_path / "u.png") as image:
        assert image.width == 1360 and image.height < image.width
        assert image.info.keys() <= {"dpi"}  # no date, no version
    assert {"#0072B2", "#D55E00"} <= colors_in(tmp_path / "u.png")
    pdf = (tmp_path / "u.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and b"CreationDate" not in pdf


def test_the_same_numbers_give_the_same_bytes(embedding, tmp_path):
    shown = [Panel("MAE", embedding("a"), 50.0), Panel("MAE-CT", embedding("b"))]
    first, second = tmp_path / "1", tmp_path / "2"
    for folder in (first, second):
        umap_figure(shown, folder / "u.pdf", folder / "u.png")
    for name in ("u.pdf", "u.png"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert sorted(p.name for p in first.iterdir()) == ["u.pdf", "u.png"]  # no temporary file


def test_many_classes_and_missing_labels(evaluations, tmp_path):
    points = np.random.default_rng(0).standard_normal((6000, 2)).astype(np.float32)
    labels = np.arange(6000) % 1000 - 1
    save_file({"points": points, "labels": labels}, evaluations / "umap.safetensors")
    out = tmp_path / "u.pdf", tmp_path / "u.png"
    umap_figure([Panel("all", evaluations / "umap.safetensors")], *out)
    assert out[0].stat().st_size < 400_000  # the points are a picture in the PDF
    assert len(colors_in(out[1])) > 500


def test_wrong_embeddings_are_named(evaluations, tmp_path):
    out = tmp_path / "u.pdf", tmp_path / "u.png"
    with pytest.raises(UserError, match="run the umap evaluation first"):
        umap_figure([], *out)
    path = evaluations / "umap.safetensors"
    with pytest.raises(UserError, match="no such file"):
        read_points(path)
    path.write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="not a safetensors file"):
        read_points(path)
    save_file({"points": np.zeros((3, 2), np.float32)}, path)
    with pytest.raises(UserError, match="no `points` and `labels`"):
        read_points(path)
    save_file({"points": np.zeros((3, 2), np.float32), "labels": np.zeros(4, np.int64)}, path)
    with pytest.raises(UserError, match="do not fit"):
        read_points(path)
    save_file(
        {"points": np.full((3, 2), np.nan, np.float32), "labels": np.zeros(3, np.int64)}, path
    )
    with pytest.raises(UserError, match="not finite"):
        umap_figure([Panel("a", path)], *out)
    assert not out[0].exists() and not out[1].exists()


def log(path: Path, steps: int) -> Path:
    lines = [{"step": s, "epoch": s / 100, "loss": 3.0 / (1 + s)} for s in range(steps)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_training_curves(tmp_path):
    stages = {
        "Pre-training": {"mae_tiny": log(tmp_path / "a.jsonl", 50)},
        "Tuning": {
            "ct_min": log(tmp_path / "b.jsonl", 900),
            "ct_aug": log(tmp_path / "c.jsonl", 9),
        },
        "Nothing": {},
    }
    training_curves(stages, tmp_path / "c.pdf", tmp_path / "c.png")
    assert {"#0072B2", "#D55E00"} <= colors_in(tmp_path / "c.png")


def test_long_curves_are_averaged_not_thinned():
    lines = [{"epoch": s, "loss": float(s % 2)} for s in range(4 * POINTS)]
    horizontal, vertical = curve([*lines, {"epoch": 5, "loss": float("nan")}], "epoch", "loss")
    assert len(horizontal) == POINTS
    assert vertical.mean() == pytest.approx(0.5) and np.all(vertical == 0.5)


def test_wrong_logs_are_named(tmp_path):
    out = tmp_path / "c.pdf", tmp_path / "c.png"
    path = tmp_path / "m.jsonl"
    with pytest.raises(UserError, match="has the run started"):
        training_curves({"s": {"r": path}}, *out)
    path.write_text("")
    with pytest.raises(UserError, match="no step was logged"):
        training_curves({"s": {"r": path}}, *out)
    path.write_text('{"epoch": 1}\n{"epo')
    with pytest.raises(UserError, match=r"m.jsonl:2: not a JSON object"):
        training_curves({"s": {"r": path}}, *out)
    path.write_text('{"epoch": 1}\n')
    with pytest.raises(UserError, match="no line has both 'epoch' and 'loss'"):
        training_curves({"s": {"r": path}}, *out)
    with pytest.raises(UserError, match="no run to draw"):
        training_curves({"s": {}}, *out)
