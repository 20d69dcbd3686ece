import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from maect.core.errors import SupersededError, UserError
from maect.core.files import read_record, sha256_file, write_record
from maect.evaluate import PROTOCOLS, load_evaluation
from maect.evaluate.base import EvaluationJob
from maect.evaluate.evaluation import Completion, evaluate
from maect.evaluate.features import extract
from maect.evaluate.protocols.probes import LinearProbe
from maect.evaluate.protocols.stored_features import Clustering, Knn
from maect.records import RunRecord

from .conftest import Rank, blobs, features_job, given, resolved, store


def finished_run(images: Path, folder: Path) -> tuple[Path, str]:
    """A copy of the small encoder's run, with its record, and the encoder's checksum."""
    run = Path(shutil.copytree(images / "runs/mae", folder / "run"))
    checksum = sha256_file(run / "encoder.safetensors")
    values = {"run": "ct", "stage": "tune", "sha256": {"encoder.safetensors": checksum}}
    write_record(RunRecord.path(run), values)
    return run, checksum


def test_tensors_beside_a_result_are_those_of_its_job(images, tmp_path, rank):
    """Not of one that was superseded, nor of one that was stopped between the two."""
    run, checksum = finished_run(images, tmp_path)
    test = store(tmp_path / "val.safetensors", *blobs(90, 12, 6, 1), encoder_sha256=checksum)
    job = EvaluationJob(run, tmp_path / "clustering.json", {"test": test})
    config = resolved(job, Clustering(runs=5))
    evaluate(rank, config=config)
    left = job.out.with_suffix(".safetensors")
    made = left.read_bytes()
    with pytest.raises(SupersededError, match="another job"):
        evaluate(Rank(current=False), config=resolved(job, Clustering(runs=1)))
    assert left.read_bytes() == made
    resolved(job, Clustering(runs=5))
    assert Completion(config).is_there()
    left.write_bytes(made + b"0")
    assert not Completion(config).is_there()


def test_json_says_what_was_done(job, rank):
    assert evaluate(rank, config=resolved(job, Knn(k=5))) == "done"
    result = read_record(job.out)
    assert set(result) == {"metrics", "settings", "provenance", "outcomes"}
    assert result["settings"]["k"] == 5 and result["settings"]["temperature"] == 0.07
    provenance = result["provenance"]
    assert provenance["run"] == "run" and provenance["encoder_sha256"] == "e" * 64
    assert provenance["splits"]["test"]["index_digest"] == "d" * 64
    assert provenance["versions"]["numpy"] == np.__version__
    assert "knn_best k and T on the test split" in provenance["test_data"]


def test_other_ranks_leave_it_to_the_first(job):
    assert evaluate(Rank(rank=1, world_size=2), config=resolved(job, Knn())) == "done"
    assert not job.out.exists()


def test_a_result_is_of_its_encoder_settings_and_inputs(images, tmp_path, rank):
    features = {"encoder_sha256": finished_run(images, tmp_path)[1]}
    job = features_job(tmp_path, blobs(60, 12, 6, 0), blobs(60, 12, 6, 1), **features)
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


def test_a_damaged_encoder_is_no_result(images, tmp_path, rank):
    run, _ = finished_run(images, tmp_path)
    encoder = run / "encoder.safetensors"
    data = bytearray(encoder.read_bytes())
    data[-1] ^= 1
    encoder.write_bytes(data)
    shards, out = images / "shards/val", tmp_path / "val.safetensors"
    job = EvaluationJob(run, tmp_path / "linear_probe.json", {"train": shards, "test": shards})
    config = resolved(job, LinearProbe())
    for refused in (
        lambda: evaluate(rank, config=config),
        lambda: extract(rank, encoder=encoder, shards=shards, out=out),
    ):
        with pytest.raises(UserError, match=r"run/encoder\.safetensors: damaged"):
            refused()
    assert not job.out.exists() and not out.exists()


def test_features_of_another_encoder_leave_what_was_there(job, rank, monkeypatch):
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
    both = blobs(60, 12, 6, 0), blobs(60, 12, 6, 0)
    raw = features_job(missing.parent / "raw", *both, norm=False, blocks=1)
    other = store(missing.with_name("o.safetensors"), *blobs(9, 12, 6, 1), encoder_sha256="f" * 64)
    for inputs, protocol, message in (
        ({"test": missing}, Clustering(), r"none\.safetensors: no such features file; make it"),
        (raw.inputs, Knn(norm=False, blocks=4), r"train\.safetensors: made of 1 blocks, not 4"),
        ({"test": other}, Knn(), r"o\.safetensors: encoder_sha256 differs; extract"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate(rank, config=resolved(given(job, **inputs), protocol))
    # Those that somebody gives by hand may be of any split.
    chosen = store(missing.with_name("chosen.safetensors"), *blobs(60, 12, 6, 0), split="train")
    assert evaluate(rank, config=resolved(given(job, test=chosen), Knn())) == "done"


def test_every_protocol_is_declared():
    for name, protocol in PROTOCOLS.items():
        assert name == protocol.name and protocol.title
        declared = protocol()
        assert declared.split_names or not declared.inputs()
        assert all(load_evaluation(needed, "tiny") for needed in declared.needs)
        assert protocol.minutes > 0
