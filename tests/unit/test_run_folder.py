"""What a changed recipe sets aside, and what is put back, through kills at any moment."""

import ast
import contextlib
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from maect.core.errors import UserError
from maect.core.files import RUN, sha256_file
from maect.data import transforms
from maect.records import RunRecord
from maect.train import run_folder
from maect.train.run_folder import PACKAGES, is_finished, take_over_folder

FILES = ("encoder.safetensors", "head.safetensors")


def finish(folder: Path, identity: str) -> None:
    take_over_folder(folder, identity, {"settings": {"of": identity}})
    for name in FILES:
        (folder / name).write_text(f"{name} of {identity}")
    (folder / "metrics.jsonl").write_text(identity)
    (folder / "state").mkdir()
    (folder / "state/step").write_text(identity)
    sha256 = {name: sha256_file(folder / name) for name in FILES}
    record = RunRecord(run="r", stage="tune", fingerprint=identity, files=FILES, sha256=sha256)
    record.write(RunRecord.path(folder))


def killed_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends at the rename after so many."""
    rename = Path.rename
    left = [count]

    def renamed(self: Path, to: Path) -> Path:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", renamed)


@pytest.fixture(autouse=True)
def changed_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clean one leaves no `source.diff`."""
    monkeypatch.setattr(run_folder, "_git", lambda *_: "changes")


@pytest.mark.parametrize("then", [("one", "two"), ("two", "one")])
@pytest.mark.parametrize("count", range(15))
def test_nothing_is_lost_between_two_recipes(tmp_path, monkeypatch, count, then):
    finish(tmp_path, "one")
    finish(tmp_path, "two")
    assert is_finished(tmp_path, "two") and not is_finished(tmp_path, "one")
    with monkeypatch.context() as patched:
        killed_after(count, patched)
        killed = count < 14  # seven move aside, seven back
        with pytest.raises(KeyboardInterrupt) if killed else contextlib.nullcontext():
            take_over_folder(tmp_path, "one", {"settings": {"of": "one"}})
    for identity in then:
        take_over_folder(tmp_path, identity, {"settings": {"of": identity}})
        assert is_finished(tmp_path, identity)
        assert (tmp_path / FILES[1]).read_text() == f"{FILES[1]} of {identity}"
        assert (tmp_path / "metrics.jsonl").read_text() == identity
        assert (tmp_path / "state/step").read_text() == identity
    other = {"one": "two", "two": "one"}[then[-1]]
    assert [path.name for path in tmp_path.glob("stale-*")] == [f"stale-{other}"]


def test_a_file_that_is_gone_although_it_is_seen_is_no_damage(tmp_path, monkeypatch):
    """Snakemake deletes a record; a client of NFS still sees it. A damaged one is named."""
    finish(tmp_path, "one")
    exists, gone = Path.exists, {RUN}
    monkeypatch.setattr(Path, "exists", lambda path: path.name in gone or exists(path))
    assert is_finished(tmp_path, "one")
    (tmp_path / RUN).rename(tmp_path / "aside")
    assert not is_finished(tmp_path, "one")
    (tmp_path / "aside").rename(tmp_path / RUN)
    gone.add("recipe.json")
    (tmp_path / "recipe.json").unlink()
    assert is_finished(tmp_path, "one") and run_folder.read_notes(tmp_path) == {}
    (tmp_path / RUN).write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        is_finished(tmp_path, "one")


def test_versions_of_all_that_changes_images_are_on_record():
    """Images are drawn and changed by third parties, also by those imported in a function."""
    tree = ast.parse(Path(transforms.__file__).read_text(encoding="utf-8"))
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
    found |= {alias.name for node in imports for alias in node.names}
    modules = {name.partition(".")[0] for name in found if name} - {*sys.stdlib_module_names}
    packages = packages_distributions()
    assert {packages[module][0] for module in modules} <= {*PACKAGES}
