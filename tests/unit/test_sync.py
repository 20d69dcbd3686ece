"""What a run has logged, copied to a service: each step once, whenever it is asked for."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from PIL import Image

from maect.cli import main
from maect.core.entries import line_of
from maect.core.files import read_record, write_record
from maect.records import RunRecord
from maect.tools import sync


def write_run(folder: Path, steps: int) -> Path:
    """A run that has come so far; it was evaluated at in every third step."""
    (folder / "online").mkdir(parents=True, exist_ok=True)
    lines = (
        line_of(n, {"loss": 2.0 - n / 10}, {"device_seconds": n / 2}) for n in range(1, steps + 1)
    )
    (folder / "metrics.jsonl").write_text("".join(lines))
    for step in range(3, steps + 1, 3):
        Image.new("RGB", (9, 9)).save(folder / f"online/neighbors-{step:08d}.jpg")
    (folder / "config.yaml").write_text("run: ct\nsettings: {epochs: 4, head: {topk: 1}}\n")
    return folder


class Recorder:
    """A service that keeps what it is told."""

    calls: list[Any] = []  # noqa: RUF012
    done = 0

    def __init__(self, run: Path, project: str, id: str | None, told: dict[str, Any]) -> None:
        self.id = id or "abc"
        self.calls.append((run.name, project, id, told["settings"]["epochs"]))

    def log(self, step: int, values: dict[str, float], pictures: dict[str, Path]) -> None:
        self.calls.append((step, values["loss"], values["device_seconds"], [*pictures]))
        self.done = step

    def close(self, finished: bool) -> None:
        self.calls.append(finished)


def test_only_what_is_new_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sync.SERVICES, "wandb", Recorder)
    monkeypatch.setattr(Recorder, "calls", [])
    run = write_run(tmp_path / "ct", 3)
    assert main(["sync", "wandb", str(run), "--project", "birds"]) == 0
    assert "3 new steps to wandb" in capsys.readouterr().out
    evaluated = (3, 1.7, 1.5, ["neighbors"])
    first = [("ct", "birds", None, 4), (1, 1.9, 0.5, []), (2, 1.8, 1.0, []), evaluated, False]
    assert Recorder.calls == first
    assert main(["sync", "wandb", str(run)]) == 0
    assert Recorder.calls == first  # nothing was new
    write_run(run, 4)
    write_record(RunRecord.path(run), {"run": "mae", "stage": "pretrain"})
    assert main(["sync", "wandb", str(run), "--project", "birds"]) == 0
    assert Recorder.calls[5:] == [("ct", "birds", "abc", 4), (4, 1.6, 2.0, []), True]
    assert read_record(run / "synced.json") == {
        "wandb": {"id": "abc", "step": 4, "project": "birds"}
    }
    assert main(["sync", "wandb", str(run), "--project", "cats"]) == 2
    assert "wandb has it in the project birds; leave --project out" in capsys.readouterr().err


def test_what_waits_in_the_client_of_wandb_is_not_taken_for_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = MagicMock()
    client.init.return_value.finish.side_effect = [KeyboardInterrupt, None]
    monkeypatch.setitem(sys.modules, "wandb", client)
    run = write_run(tmp_path / "ct", 3)
    with pytest.raises(KeyboardInterrupt):
        sync.sync("wandb", run, "birds")
    assert sync.sync("wandb", run, "birds") == 3
    assert sync.sync("wandb", run, "birds") == 0


def test_a_copy_that_ended_early_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def fails_once(self: Recorder, step: int, *_: Any) -> None:
        if step == 2 and not sent[1:]:
            sent.append(-1)
            raise ConnectionError
        sent.append(step)
        self.done = step

    monkeypatch.setitem(sync.SERVICES, "wandb", Recorder)
    monkeypatch.setattr(Recorder, "calls", [])
    monkeypatch.setattr(Recorder, "log", fails_once)
    with pytest.raises(ConnectionError):
        sync.sync("wandb", write_run(tmp_path / "ct", 3), "birds")
    assert sync.sync("wandb", tmp_path / "ct", "birds") == 2
    assert sent == [1, -1, 2, 3]
    assert [call[2] for call in Recorder.calls if call is not False] == [None, "abc"]


class Client:
    """MLflow's client; the server is away from the second batch on, until it is `back`."""

    def __init__(self, stored: list[int], back: list[bool]) -> None:
        self.stored, self.back, self.batches = stored, back, 0

    def get_experiment_by_name(self, name: str) -> None: ...

    def create_experiment(self, name: str) -> str:
        return "1"

    def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def log_param(self, *_: Any) -> None: ...

    def log_artifact(self, *_: Any) -> None: ...

    def set_terminated(self, *_: Any) -> None: ...

    def log_batch(self, id: str, metrics: list[Any]) -> None:
        self.batches += 1
        if self.batches > 1 and not self.back:
            raise ConnectionError
        self.stored += [metric.step for metric in metrics if metric.name == "loss"]


def test_a_connection_that_is_lost_costs_no_step_and_repeats_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[int] = []
    back: list[bool] = []
    monkeypatch.setattr(sync, "_AT_ONCE", 4)  # two steps of two values
    metric = lambda name, value, time, step: SimpleNamespace(name=name, step=step)  # noqa: E731
    fake = SimpleNamespace(
        MlflowClient=lambda: Client(stored, back), entities=SimpleNamespace(Metric=metric)
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://own")
    run = write_run(tmp_path / "ct", 5)
    with pytest.raises(ConnectionError):
        sync.sync("mlflow", run)
    assert read_record(run / "synced.json")["mlflow"]["step"] == 2
    back.append(True)
    assert sync.sync("mlflow", run) == 3
    assert stored == [1, 2, 3, 4, 5]


def test_what_cannot_be_copied_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sync", "wandb", str(tmp_path)]) == 2
    assert "has logged nothing (no metrics.jsonl)" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert main(["sync", "mlflow", str(write_run(tmp_path / "ct", 1))]) == 2
    assert "mlflow is not installed: uv pip install mlflow" in capsys.readouterr().err
    assert not (tmp_path / "ct/synced.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize(("service", "file"), [("wandb", "wandb/settings"), ("mlflow", "mlruns")])
def test_nobody_else_says_where_a_log_is_sent(
    service: str,
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`wandb/settings` of the working folder names the server that gets the user's key."""
    monkeypatch.setitem(sync.SERVICES, service, Recorder)
    monkeypatch.setattr(Recorder, "calls", [])
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run, here = write_run(tmp_path / "ct", 1), tmp_path / "here"
    (here / file).parent.mkdir(parents=True)
    (here / file).write_text("[default]\nbase_url = http://evil\n")
    monkeypatch.chdir(here)
    os.chown(here / file, 12345, 12345)
    assert main(["sync", service, str(run)]) == 2
    said = f"{here / file}: made by user 12345; {service} would read it, so start in a folder of"
    assert said in capsys.readouterr().err
    os.chown(here / file, 0, 0)
    (here / file).chmod(0o666)
    assert main(["sync", service, str(run)]) == 2
    assert f"{here / file}: every user may write it" in capsys.readouterr().err
    (here / file).unlink()
    here.chmod(0o1777)  # where anybody may put it a moment later
    assert main(["sync", service, str(run)]) == 2
    assert "every user may write there" in capsys.readouterr().err
    assert Recorder.calls == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://own")
    assert main(["sync", "mlflow", str(run)]) == (0 if service == "mlflow" else 2)
    here.chmod(0o755)
    (here / file).write_text("[default]\n")
    assert main(["sync", service, str(run)]) == 0
    assert Recorder.calls[-1] is False


def test_mlflow_has_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra maect[mlflow]")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    for steps in (2, 2, 4):
        run = write_run(tmp_path / "ct", steps)
        assert main(["sync", "mlflow", str(run)]) == 0
    client, id = mlflow.MlflowClient(), read_record(run / "synced.json")["mlflow"]["id"]
    history = client.get_metric_history(id, "loss")
    assert [(m.step, m.value) for m in history] == [(1, 1.9), (2, 1.8), (3, 1.7), (4, 1.6)]
    assert client.get_run(id).data.params["settings.head.topk"] == "1"
    files = client.list_artifacts(id, "online")
    assert [file.path for file in files] == ["online/neighbors-00000003.jpg"]


def test_wandb_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs the extra maect[wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for steps in (2, 4):
        run = write_run(tmp_path / "ct", steps)
        assert main(["sync", "wandb", str(run)]) == 0
    id = read_record(run / "synced.json")["wandb"]["id"]
    files = sorted(run.glob(f"wandb/offline-run-*-{id}/*.wandb"))
    assert len(files) == 2
    assert b"neighbors" in files[1].read_bytes() and b"neighbors" not in files[0].read_bytes()
