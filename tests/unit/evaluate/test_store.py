import numpy as np
import pytest
from safetensors.numpy import load_file

from maect.core.errors import MissingFileError, UserError
from maect.evaluate.store import (
    check_labelled,
    check_same_encoder,
    open_features,
    open_record,
    write_features,
)

from .conftest import RECORD, blobs, store


def test_what_was_written_is_read(tmp_path):
    features, labels = blobs(50, 7, 4, 0)
    path = store(
        tmp_path / "a.safetensors", features, labels, class_names=["a", "b", "c", "d", "e"]
    )
    found = open_features(path)
    assert (found.n, found.width, found.classes) == (50, 7, 5)
    assert np.array_equal(found.values, features) and np.array_equal(found.labels, labels)
    with pytest.raises(ValueError, match="read-only"):
        found.values[0] = 1
    assert found.names()[:2] == ["c/0000", "c/0001"]
    # Any other reader of the format sees the same.
    assert np.array_equal(load_file(path)["features"], features)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="no such features file"):
        open_features(tmp_path / "b.safetensors")
    with pytest.raises(MissingFileError):
        open_record(tmp_path / "b.safetensors")


def test_too_few_rows_leave_no_file(tmp_path):
    features, labels = blobs(10, 3, 2, 0)
    with pytest.raises(ValueError, match="9 rows of features for 10 labels"):
        write_features(
            tmp_path / "a.safetensors", [features[:9]], width=3, labels=labels, keys=[],
            record=RECORD,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_empty_or_unlabelled_is_named(tmp_path):
    empty = store(tmp_path / "a.safetensors", np.ones((0, 3)), [])
    with pytest.raises(UserError, match=r"a\.safetensors: holds no samples"):
        open_features(empty)
    features, labels = blobs(20, 3, 2, 0)
    labels[4] = -1
    found = open_features(store(tmp_path / "b.safetensors", features, labels))
    with pytest.raises(UserError, match="sample 4 has no label"):
        check_labelled(found)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("encoder_sha256", "f" * 64), ("pooling", "mean"), ("precision", "bf16"), ("norm", False),
        ("blocks", 2), ("class_names", ["a", "b"]), ("image_size", 32), ("resize", 99),
    ],
)  # fmt: skip
def test_features_of_two_encoders_do_not_mix(field, value, tmp_path):
    a = open_features(store(tmp_path / "a.safetensors", *blobs(20, 3, 2, 0), norm=True, blocks=1))
    check_same_encoder(a, a)
    b = store(tmp_path / "b.safetensors", *blobs(20, 3, 2, 0), **(a.record | {field: value}))
    with pytest.raises(UserError, match=f"{field} differs"):
        check_same_encoder(a, open_features(b))
