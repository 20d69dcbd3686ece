import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from maect.core.errors import SupersededError, UserError
from maect.core.files import read_record, sha256_file, write_record
from maect.evaluate import PROTOCOLS, load_evaluation
from maect.evaluate.base import EvaluationJob
from maect.evaluate.evaluation import Completion, evaluate
from maect.evaluate.features import extract
from maect.evaluate.protocols import Clustering, Knn, LinearProbe, Umap
from maect.records import RunRecord

from .conftest import Rank, blobs, given, resolved, store


def test_tensors_of_a_job_that_was_stopped_are_not_those_of_the_result_beside_them(
    images: Path, tmp_path: Path, rank: Rank
) -> None:
    features = images / "runs" / "mae"
    run = tmp_path / "run"
    shutil.copytree(features, run)
    checksum = sha256_file(run / "encoder.safetensors")
    write_record(
        RunRecord.path(run),
        {"run": "ct", "stage": "tune", "sha256": {"encoder.safetensors": checksum}},
    )
    test = store(tmp_path / "test.safetensors", *blobs(60, 12, 6, 0), encoder_sha256=checksum)
    config = resolved(EvaluationJob(run, tmp_path / "c.json", {"test": test}), Clustering(runs=2))
    evaluate(rank, config=config)
    assert Completion(config).is_there()
    left = tmp_path / "c.safetensors"
    left.write_bytes(left.read_bytes() + b"0")
    assert not Completion(config).is_there()


def test_json_says_what_was_done(job: EvaluationJob, rank: Rank) -> None:
    assert evaluate(rank, config=resolved(job, Knn(k=5))) == "done"
    result = read_record(job.out)
    assert set(result) == {"metrics", "settings", "provenance", "outcomes"}
    assert result["settings"]["k"] == 5 and result["settings"]["temperature"] == 0.07
    provenance = result["provenance"]
    assert provenance["run"] == "run" and provenance["encoder_sha256"] == "e" * 64
    assert provenance["splits"]["test"]["index_digest"] == "d" * 64
    assert provenance["versions"]["numpy"] == np.__version__
    assert "knn_best k and T on the test split" in provenance["test_data"]


def test_other_ranks_leave_it_to_the_first(job: EvaluationJob) -> None:
    assert evaluate(Rank(rank=1, world_size=2), config=resolved(job, Knn())) == "done"
    assert not job.out.exists()


def test_a_result_is_of_its_encoder_settings_and_inputs(
    images: Path, tmp_path: Path, rank: Rank
) -> None:
    run = tmp_path / "run"
    shutil.copytree(images / "runs" / "mae", run)
    checksum = sha256_file(run / "encoder.safetensors")
    write_record(
        RunRecord.path(run),
        {"run": "ct", "stage": "tune", "sha256": {"encoder.safetensors": checksum}},
    )
    features = {"encoder_sha256": checksum}
    paths = {
        split: store(tmp_path / f"{split}.safetensors", *blobs(60, 12, 6, seed), **features)
        for seed, split in enumerate(("train", "test"))
    }
    job = EvaluationJob(run, tmp_path / "knn.json", paths)
    config = resolved(job, Knn(k=5))
    asked = Completion(config)
    with pytest.MonkeyPatch.context() as patch:
        # A client of NFS still sees what Snakemake has deleted.
        patch.setattr(Path, "exists", lambda path: True)
        assert not asked.is_there()
    with pytest.raises(SupersededError, match="another job"):
        evaluate(Rank(current=False), config=config)
    assert not job.out.exists()
    evaluate(rank, config=config)
    assert Completion(config).is_there()
    assert not Completion(resolved(job, Knn(k=6))).is_there()
    # Features that were extracted again: in another precision, or with other bits.
    for changed in ({"precision": "bf16"}, {}):
        numbers = blobs(60, 12, 6, 0 if changed else 7)
        again = store(tmp_path / "again.safetensors", *numbers, **features | changed)
        assert not Completion(resolved(given(job, train=again), Knn(k=5))).is_there()
    assert Completion(resolved(job, Knn(k=5))).is_there()
    assert not Completion(resolved(replace(job, resize=20), Knn(k=5))).is_there()
    other = store(tmp_path / "o.safetensors", *blobs(60, 12, 6, 1), index_digest="0", **features)
    assert not Completion(resolved(given(job, test=other), Knn(k=5))).is_there()
    assert Completion(resolved(job, Knn(k=5))).is_there()


def test_a_superseded_job_leaves_the_tensors_of_its_successor(tmp_path: Path, rank: Rank) -> None:
    """They were replaced before it was asked who is current: the successor's result was damaged."""
    test = store(tmp_path / "val.safetensors", *blobs(90, 12, 6, 1))
    job = EvaluationJob(tmp_path / "run", tmp_path / "clustering.json", {"test": test})
    before = resolved(job, Clustering(runs=1)).read_text(encoding="utf-8")
    config = resolved(job, Clustering(runs=5))
    evaluate(rank, config=config)
    left = job.out.with_suffix(".safetensors").read_bytes()
    config.write_text(before, encoding="utf-8")
    with pytest.raises(SupersededError, match="another job"):
        evaluate(Rank(current=False), config=config)
    assert job.out.with_suffix(".safetensors").read_bytes() == left


def test_features_of_other_blocks_are_refused(tmp_path: Path, rank: Rank) -> None:
    paths = {
        split: store(tmp_path / f"{split}.safetensors", *blobs(60, 12, 6, 0), norm=False, blocks=1)
        for split in ("train", "test")
    }
    job = EvaluationJob(tmp_path / "run", tmp_path / "knn.json", paths)
    with pytest.raises(UserError, match=r"train\.safetensors: made of 1 blocks, not 4"):
        evaluate(rank, config=resolved(job, Knn(norm=False, blocks=4)))


def test_a_damaged_encoder_is_no_result(images: Path, tmp_path: Path, rank: Rank) -> None:
    run = tmp_path / "run"
    shutil.copytree(images / "runs" / "mae", run)
    encoder = run / "encoder.safetensors"
    record = {"run": "r", "stage": "tune", "sha256": {encoder.name: sha256_file(encoder)}}
    write_record(RunRecord.path(run), record)
    data = bytearray(encoder.read_bytes())
    data[-1] ^= 1
    encoder.write_bytes(data)
    shards = images / "shards" / "val"
    job = EvaluationJob(run, tmp_path / "linear_probe.json", {"train": shards, "test": shards})
    with pytest.raises(UserError, match=r"run/encoder\.safetensors: damaged"):
        evaluate(rank, config=resolved(job, LinearProbe()))
    with pytest.raises(UserError, match=r"run/encoder\.safetensors: damaged"):
        extract(rank, encoder=encoder, shards=shards, out=tmp_path / "val.safetensors")
    assert not job.out.exists() and not (tmp_path / "val.safetensors").exists()


def test_wrong_input_is_one_line(job: EvaluationJob, rank: Rank) -> None:
    config = resolved(job, Knn())
    plain = config.read_text()
    config.write_text(plain.replace("protocol: knn", "protocol: kmn"))
    with pytest.raises(UserError, match="unknown 'kmn'; did you mean 'knn'"):
        evaluate(rank, config=config)
    config.write_text(plain.replace("temperature:", "tempurature:"))
    with pytest.raises(UserError, match="unknown key 'tempurature'; did you mean"):
        evaluate(rank, config=config)
    config.write_text(plain)
    (job.run).mkdir()
    (job.run / "encoder.safetensors").write_bytes(b"another")
    with pytest.raises(UserError, match=r"made from another encoder than .*encoder\.safetensors"):
        evaluate(rank, config=config)
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
        ("accuracy", {"shots": [-1]}, r"shots\.0: .* greater than 0"),
        ("linear_probe", {"learning_rates": []}, "learning_rates: .* at least 1 item"),
        ("linear_probe", {"learning_rates": [0.1, -0.1]}, r"learning_rates\.1: .* greater than 0"),
    ],
)
def test_lists_that_make_no_sense_are_one_line(protocol: str, settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=f"^{protocol}: {message}") as error:
        load_evaluation(protocol, "large", settings)
    assert "\n" not in str(error.value)


def test_features_of_another_encoder_leave_what_was_there(
    job: EvaluationJob, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before the evaluation, which writes tensors beside the JSON."""
    monkeypatch.setattr(Clustering, "evaluate", lambda *_: pytest.fail("evaluated"))
    job.run.mkdir()
    (job.run / "encoder.safetensors").write_bytes(b"another")
    with pytest.raises(UserError, match=r"test\.safetensors: made from another encoder than"):
        evaluate(rank, config=resolved(job, Clustering()))
    # What is missing, or does not belong together, the protocol says itself.
    (job.run / "encoder.safetensors").unlink()
    missing = job.path("test").with_name("none.safetensors")
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"none\.safetensors: no such features file; make it with"):
        evaluate(rank, config=resolved(given(job, test=missing), Clustering()))
    other = store(missing.with_name("o.safetensors"), *blobs(9, 12, 6, 1), encoder_sha256="f" * 64)
    with pytest.raises(UserError, match=r"o\.safetensors: encoder_sha256 differs; extract"):
        evaluate(rank, config=resolved(given(job, test=other), Knn()))


def test_declarations_need_nothing_heavy() -> None:
    code = (
        "import sys, maect.evaluate;"
        "assert not {'torch', 'numpy', 'scipy', 'sklearn', 'safetensors'} & set(sys.modules);"
        "from maect.evaluate import evaluation, low_shot, clustering;"
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


def test_umap_is_reproducible(tmp_path: Path, job: EvaluationJob, rank: Rank) -> None:
    features, labels = blobs(60, 8, 3, 0, spread=0.1)
    test = store(tmp_path / "t.safetensors", features, labels, class_names=["a", "b", "c"])
    points, chosen = [], labels[labels != 1]
    for number in range(2):
        one = replace(given(job, test=test), out=tmp_path / f"{number}.json")
        assert Umap(classes=("c", "a")).evaluate(rank, one) == {"samples": len(chosen)}
        points.append(load_file(tmp_path / f"{number}.safetensors"))
    first = points[0]["points"]
    assert first.shape == (len(chosen), 2) and np.isfinite(first).all()
    assert np.array_equal(first, points[1]["points"])
    assert np.array_equal(points[0]["labels"], chosen)
    # Classes that lie far apart do so in the plane.
    centers = np.stack([first[chosen == c].mean(0) for c in (0, 2)])
    own = np.linalg.norm(first - centers[chosen // 2], axis=1).mean()
    assert np.linalg.norm(centers[0] - centers[1]) > own
    with pytest.raises(UserError, match="neighbors 60 needs more than the 60 samples"):
        Umap(neighbors=60).evaluate(rank, given(job, test=test))
