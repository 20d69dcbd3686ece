"""Files are whole or not there, and readable by those whom the umask lets."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from maect.core.files import UMASK, atomic_write


def test_a_failure_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(RuntimeError), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_tensors_are_readable_like_other_files(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with atomic_write(path) as temporary:
        save_file({"x": np.zeros(3)}, temporary)
    assert path.stat().st_mode & 0o777 == 0o666 & ~UMASK
