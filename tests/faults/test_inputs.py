"""Hostile and odd input ends in a line: files, folders, words of commands, tables of images."""

import os
import subprocess
import sys
from functools import partial

import pyarrow as pa
import pytest
from pyarrow import parquet

from maect.core.errors import UserError
from maect.core.files import read_json, read_record, read_text, with_retries
from maect.core.settings import SettingsFile
from maect.core.yaml_files import parse_yaml
from maect.data.sources.columns import Columns
from maect.evaluate.store import open_features, open_record
from maect.experiment import load
from maect.experiment.schema import expand_path
from maect.models.weights import load_tensors
from maect.records import entries
from maect.tools.new_experiment import new_experiment

PLAIN = "datasets: {digits: {kind: digits, splits: {train: {}, val: {}}}}\n"


RUN = "runs: {m: {recipe: mae, size: tiny, set: {epochs: %s}}}"
REFUSED = {
    "a setting twice": (PLAIN + RUN % "5, batch_size: 64, epochs: 50", "is there twice"),
    "a run twice": (PLAIN + "runs:\n  m: {recipe: mae}\n  m: {recipe: mae}\n", "is there twice"),
    "a key twice": (PLAIN + PLAIN + RUN % "5", "is there twice"),
    "sexagesimal": (PLAIN + RUN % "1:30", "1:30"),
    "brackets": ("[" * 3_000 + "]" * 3_000, "not valid YAML|a mapping of keys"),
    "mappings": ("a: " + "{b: " * 3_000 + "1" + "}" * 3_000, "not valid YAML"),
    "digits": ("seeds: " + "9" * 5_000, "integer string conversion"),
    "recursion": ("a: &a {b: *a}", "Field required"),
    "a long list": (PLAIN + f"runs: {{}}\ndescription: {list(range(10_000))}", "description"),
}


@pytest.mark.parametrize(("text", "words"), REFUSED.values(), ids=REFUSED)
def test_an_experiment_is_refused_in_a_line(tmp_path, text, words):
    """It quotes a part of what was given."""
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=words) as error:
        load(str(file))
    assert "\n" not in str(error.value) and len(str(error.value)) < 3000


def test_a_key_given_twice_in_a_resolved_file_and_on_the_command_line(tmp_path):
    """Files that jobs read, and changes to them."""
    (tmp_path / "c.yaml").write_text("a: 1\na: 2\n")
    with pytest.raises(UserError, match=r"c\.yaml: not valid YAML \(the key 'a' is there twice"):
        SettingsFile.read(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_text("a: 1\n")
    with pytest.raises(UserError, match="is there twice"):
        SettingsFile.read(tmp_path / "c.yaml", ["settings={b: 1, b: 2}"])


def test_merged_keys_may_be_replaced():
    """`<<` gives keys that a mapping then gives itself, also through several anchors."""
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, y: 2}\nc: {<<: *b, x: 3}\nd: {<<: [*b, *a], z: 4}\n"
    assert parse_yaml(text, "") == {
        "a": {"x": 1, "y": 1}, "b": {"x": 1, "y": 2}, "c": {"x": 3, "y": 2},
        "d": {"x": 1, "y": 2, "z": 4},
    }  # fmt: skip


def test_what_yaml_1_1_reads_otherwise(tmp_path):
    """Octal and sexagesimal numbers, dates, `yes` and `no`."""
    text = "[010, 1:30, 0b11, 2026-01-02, yes, no, on, OFF, true, False, 1_000, 0x10, 1.5e+3, ~]"
    assert parse_yaml(text, "") == [
        "010", "1:30", "0b11", "2026-01-02", "yes", "no", "on", "OFF", True, False, 1000, 16,
        1500.0, None,
    ]  # fmt: skip
    file = tmp_path / "x.yaml"
    file.write_text(PLAIN + RUN % "010")
    assert load(str(file)).runs["m"].settings.epochs == 10


def test_runs_are_named_as_their_values_are_written(tmp_path):
    """`no` was `0`."""
    run = 'runs: {"m_{a}": {recipe: mae, size: tiny, each: {a: [%s]}}}'
    file = tmp_path / "x.yaml"
    file.write_text(PLAIN + run % "no, '1.10', 0.5, 10")
    assert [*load(str(file)).runs] == ["m_no", "m_1.10", "m_0.5", "m_10"]


def test_json_that_is_nested_deeply(tmp_path):
    """`RecursionError` in a reader of others' files."""
    (tmp_path / "x.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(UserError, match=r"x\.json: not valid JSON \(maximum recursion depth"):
        read_json(tmp_path / "x.json")


@pytest.mark.timeout(60)
def test_a_library_opens_no_pipe(tmp_path):
    """It would wait for somebody who writes; nobody waits for a loop of links or for a folder."""
    names = ("pipe", "loop", "device", "folder")
    pipe, loop, device, folder = paths = [tmp_path / f"{name}.safetensors" for name in names]
    os.mkfifo(pipe)
    loop.symlink_to(loop.name)
    device.symlink_to("/dev/zero")
    folder.mkdir()
    for path in paths:
        for read in (open_record, load_tensors, open_features, read_record):
            with pytest.raises(UserError):
                read(path)
        for read in (partial(with_retries, read_text), entries):
            with pytest.raises(OSError):
                read(path)


READ_BACKWARDS = """
import sys, tracemalloc, pyarrow
from pathlib import Path
from maect.data.sources.columns import Columns
path = Path(sys.argv[1])
images = Columns(path)
chosen = images.listing().entries[::-3]
tracemalloc.start()
images.read_ahead(chosen, path.parent)
assert len({images.read(entry) for entry in chosen}) == 1
print(tracemalloc.get_traced_memory()[1], pyarrow.default_memory_pool().max_memory())
"""


def test_a_small_parquet_file_of_large_images(tmp_path):
    """A column of equal images: 100 MiB in a file of 260 kB, read in any order."""
    size, count, path = 256 << 10, 400, tmp_path / "t.parquet"
    table = pa.table({"image": pa.array([os.urandom(size)] * count, pa.binary())})
    parquet.write_table(table, path, row_group_size=count)
    assert path.stat().st_size < 2 * size
    words = [sys.executable, "-c", READ_BACKWARDS, path]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    python, arrow = map(int, done.stdout.split())
    assert python < size * count / 10 and arrow < size * count / 2
    assert [*tmp_path.iterdir()] == [path]


def test_rows_of_tables_in_any_order(tmp_path):
    """Each row's own bytes, ahead or not, over groups and batches; none where there are none."""
    images = [bytes([n % 256, n // 256]) * 50 for n in range(300)]
    values = pa.array([None if n == 7 else data for n, data in enumerate(images)], pa.binary())
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"image": values}), path, row_group_size=70)
    order = [299, 0, 1, 150, 69, 70, 8, 250, 71, 3]
    for ahead in (False, True):
        source = Columns(path)
        entries = source.listing().entries
        if ahead:
            source.read_ahead(entries, tmp_path)
        assert [source.read(entries[n]) for n in order] == [images[n] for n in order]
        with pytest.raises(OSError, match="no bytes"):
            source.read(entries[7])


def test_folders_named_like_variables(tmp_path, monkeypatch):
    """Images in `$HOME` would have been looked for elsewhere."""
    monkeypatch.setenv("ELSEWHERE", "/tmp")
    images = tmp_path / "$ELSEWHERE"
    (images / "a").mkdir(parents=True)
    with pytest.raises(UserError, match="the name of a variable"):
        new_experiment(images, tmp_path / "x.yaml")
    assert not (tmp_path / "x.yaml").exists()


def test_a_user_without_a_home(monkeypatch):
    """Results in `/nonexistent`, or in a folder called `~nobody-there`."""
    monkeypatch.setenv("HOME", "/nonexistent")
    for path in ("~/results", "~nobody-is-called-so/results"):
        with pytest.raises(UserError, match="there is no folder"):
            expand_path(path, "storage")
