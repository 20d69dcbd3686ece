import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from maect.core.errors import UserError
from maect.evaluate import PROTOCOLS, load_evaluation
from maect.evaluate.clustering import Clustering
from maect.evaluate.job import Job
from maect.evaluate.run import run_protocol
from maect.evaluate.umap import Umap

from .conftest import Rank, blobs, given, store


def test_json_says_what_was_done(job: Job, rank: Rank) -> None:
    verdict = run_protocol(
        rank,
        protocol="knn",
        run=job.run,
        out=job.out,
        inputs={**job.inputs, "probe": "not/read"},
        settings={"k": 5},
    )
    assert verdict == "done"
    result = json.loads(job.out.read_text())
    assert set(result) == {"metrics", "settings", "provenance"}
    assert result["settings"]["k"] == 5 and result["settings"]["temperature"] == 0.07
    provenance = result["provenance"]
    assert provenance["run"] == "run" and provenance["encoder_sha256"] == "e" * 64
    assert provenance["splits"]["test"]["index_digest"] == "d" * 64
    assert provenance["versions"]["numpy"] == np.__version__
    assert "choose k and T on the test split" in provenance["test_data"]


@pytest.mark.parametrize(
    ("protocol", "used"),
    [
        ("umap", "fitted to the test split"),
        ("robustness", "classes among its labels"),
        ("clustering", "test split's own mean"),
        ("effective_invariance", "chosen on the test split"),
        ("low_shot", None),
        ("fine_tune", None),
    ],
)
def test_json_says_what_test_data_was_used_for(protocol: str, used: str | None) -> None:
    text = PROTOCOLS[protocol].test_data
    assert text is None if used is None else text is not None and used in text


def test_other_ranks_leave_it_to_the_first(job: Job) -> None:
    arguments = {"protocol": "knn", "run": job.run, "inputs": job.inputs}
    assert run_protocol(Rank(rank=1, world_size=2), out=job.out, **arguments) == "done"
    assert not job.out.exists()


def test_wrong_input_is_one_line(job: Job, rank: Rank) -> None:
    arguments = {"run": job.run, "out": job.out, "inputs": job.inputs}
    with pytest.raises(UserError, match="unknown protocol 'kmn'"):
        run_protocol(rank, protocol="kmn", **arguments)
    with pytest.raises(UserError, match="knn: unknown key 'tempurature'; did you mean"):
        run_protocol(rank, protocol="knn", settings={"tempurature": 1}, **arguments)
    (job.run).mkdir()
    (job.run / "encoder.safetensors").write_bytes(b"another")
    with pytest.raises(UserError, match=r"made from another encoder than .*encoder\.safetensors"):
        run_protocol(rank, protocol="knn", **arguments)
    assert not job.out.exists()


@pytest.mark.parametrize(
    ("protocol", "settings", "message"),
    [
        ("knn", {"sweep": [10, 0]}, r"sweep\.1: .* greater than 0 \(given: 0\)"),
        ("knn", {"temperatures": [0]}, r"temperatures\.0: .* greater than 0"),
        ("low_shot", {"shots": [0]}, r"shots\.0: .* greater than 0"),
        ("low_shot", {"fractions": [0.1, 2.0]}, r"fractions\.1: .* less than or equal to 1"),
        ("low_shot", {"fractions": [0]}, r"fractions\.0: .* greater than 0"),
        ("low_shot", {"shots": []}, "neither shots nor fractions"),
        ("fine_tune", {"shots": [-1]}, r"shots\.0: .* greater than 0"),
        ("linear_probe", {"learning_rates": []}, "learning_rates: .* at least 1 item"),
        ("linear_probe", {"learning_rates": [0.1, -0.1]}, r"learning_rates\.1: .* greater than 0"),
    ],
)
def test_lists_that_make_no_sense_are_one_line(
    job: Job, rank: Rank, protocol: str, settings: dict, message: str
) -> None:
    with pytest.raises(UserError, match=f"^{protocol}: {message}") as error:
        run_protocol(rank, protocol=protocol, run=job.run, out=job.out, settings=settings)
    assert "\n" not in str(error.value)


def test_features_of_another_encoder_leave_what_was_there(
    job: Job, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before the evaluation, which writes tensors beside the JSON."""
    monkeypatch.setattr(Clustering, "evaluate", lambda *_: pytest.fail("evaluated"))
    job.run.mkdir()
    (job.run / "encoder.safetensors").write_bytes(b"another")
    with pytest.raises(UserError, match=r"test\.safetensors: made from another encoder than"):
        run_protocol(rank, protocol="clustering", run=job.run, out=job.out, inputs=job.inputs)
    # What is missing, or does not belong together, the protocol says itself.
    (job.run / "encoder.safetensors").unlink()
    missing = job.path("test").with_name("none.safetensors")
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"none\.safetensors: no such features file; make it with"):
        run_protocol(
            rank, protocol="clustering", run=job.run, out=job.out, inputs={"test": missing}
        )
    other = store(missing.with_name("o.safetensors"), *blobs(9, 12, 6, 1), encoder_sha256="f" * 64)
    with pytest.raises(UserError, match=r"o\.safetensors: encoder_sha256 differs; extract"):
        run_protocol(
            rank, protocol="knn", run=job.run, out=job.out, inputs={**job.inputs, "test": other}
        )


def test_declarations_need_nothing_heavy() -> None:
    code = (
        "import sys, maect.evaluate;"
        "assert not {'torch', 'numpy', 'scipy', 'sklearn', 'safetensors'} & set(sys.modules);"
        "from maect.evaluate import run, neighbors, logistic, kmeans;"
        "assert not {'torch', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_protocol_is_declared() -> None:
    for name, protocol in PROTOCOLS.items():
        assert name == protocol.name and protocol.title
        declared = protocol()
        assert declared.split_names or not declared.inputs()
        assert all(load_evaluation(needed, "tiny") for needed in declared.needs)
        assert protocol.minutes > 0


def test_umap_is_reproducible(tmp_path: Path, job: Job, rank: Rank) -> None:
    features, labels = blobs(60, 8, 3, 0, spread=0.1)
    test = store(tmp_path / "t.safetensors", features, labels, class_names=["a", "b", "c"])
    points = []
    for number in range(2):
        one = replace(given(job, test=test), out=tmp_path / f"{number}.json")
        assert Umap().evaluate(rank, one) == {"samples": 60}
        points.append(load_file(tmp_path / f"{number}.safetensors"))
    assert points[0]["points"].shape == (60, 2) and np.isfinite(points[0]["points"]).all()
    assert np.array_equal(points[0]["points"], points[1]["points"])
    assert np.array_equal(points[0]["labels"], labels)
    # Classes that lie far apart do so in the plane.
    centers = np.stack([points[0]["points"][labels == c].mean(0) for c in range(3)])
    own = np.linalg.norm(points[0]["points"] - centers[labels], axis=1).mean()
    assert min(np.linalg.norm(centers[a] - centers[b]) for a, b in ((0, 1), (0, 2), (1, 2))) > own
    Umap(classes=("c", "a")).evaluate(rank, given(job, test=test))
    assert set(load_file(job.out.with_suffix(".safetensors"))["labels"]) == {0, 2}
    with pytest.raises(UserError, match="neighbors 60 needs more than the 60 samples"):
        Umap(neighbors=60).evaluate(rank, given(job, test=test))
