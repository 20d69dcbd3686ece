from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from maect.data.bundled import SHIFTS, write_digits


def read(folder: Path) -> dict[str, np.ndarray]:
    paths = sorted(folder.rglob("*.png"))
    return {str(p.relative_to(folder)): np.asarray(Image.open(p)).astype(int) for p in paths}


def test_digits_are_complete_and_shifted_ones_are_those_of_validation_changed(tmp_path):
    write_digits(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.png")}
    write_digits(tmp_path)  # kept as they are
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.png")} == before
    assert {path.name for path in tmp_path.iterdir()} == {"train", "val", *SHIFTS}
    plain, train = read(tmp_path / "val"), read(tmp_path / "train")
    assert len(plain) == 500 and len(train) == 1297 and not set(plain) & set(train)
    assert Counter(name[0] for name in plain) == dict.fromkeys("0123456789", 50)
    assert {digit.shape for digit in plain.values()} == {(16, 16, 3)}
    shifted = {name: read(tmp_path / name) for name in SHIFTS}
    assert all(set(images) == set(plain) for images in shifted.values())
    assert all(np.array_equal(shifted["inverted"][n], 255 - plain[n]) for n in plain)
    noise = np.stack([shifted["noisy"][name] - plain[name] for name in plain])
    inside = np.stack([(x > 64) & (x < 191) for x in plain.values()])
    assert np.abs(noise).max() == 64 and abs(noise[inside].mean()) < 1
    assert 36 < noise[inside].std() < 38  # 128 / sqrt(12)
    assert len(np.unique(noise[:20], axis=0)) == 20
    # Turned back, most of a digit lies where it was.
    back = np.stack(
        [
            np.asarray(Image.fromarray(x.astype(np.uint8)).rotate(-30, Image.Resampling.BICUBIC))
            for x in shifted["rotated"].values()
        ]
    )
    whole = np.stack(list(plain.values()))
    assert np.corrcoef(back.ravel(), whole.ravel())[0, 1] > 0.95
    assert (
        np.corrcoef(np.stack(list(shifted["rotated"].values())).ravel(), whole.ravel())[0, 1] < 0.9
    )
