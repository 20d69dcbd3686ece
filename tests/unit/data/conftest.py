import shutil
from pathlib import Path

import pytest
from sample_images import image_folder

from maect.data.index import Index, open_index
from maect.data.shards import shard


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("images") / "train")


@pytest.fixture(scope="session")
def shards(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "train"
    shard(images, out, "folder", 3)
    return out


@pytest.fixture()
def copy(shards: Path, tmp_path: Path) -> Path:
    """The shards, to be damaged."""
    return Path(shutil.copytree(shards, tmp_path / "copy"))


@pytest.fixture()
def index(shards: Path) -> Index:
    return open_index(shards)
