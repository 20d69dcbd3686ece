"""Copies what a run has logged to Weights & Biases or to MLflow, from the run's files alone.

A second call adds what is new since: `synced.json` beside the files says what was copied, where to.
"""

import os
import stat
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from maect.core.entries import entries
from maect.core.errors import UserError
from maect.core.files import read_record, write_record
from maect.core.owners import exposed, is_trusted, owner_name
from maect.core.yaml_files import read_yaml
from maect.records import is_finished
from maect.train.metrics import PICTURES

SYNCED = "synced.json"
_AT_ONCE = 500
"""Values that MLflow is sent together; it takes 1,000."""


class WandB:
    """Weights & Biases, in `$WANDB_MODE` and at `$WANDB_BASE_URL` as its client has it.

    `id` is what the service calls the copy, `done` the last step that it has for certain: until the
    end they wait in its client. A step that comes again is ignored there.
    """

    done = _given = 0

    def __init__(self, run: Path, project: str, id: str | None, config: dict[str, Any]) -> None:
        wandb = _package("wandb")
        self._image = wandb.Image
        self._run = wandb.init(
            project=project, name=run.name, id=id, config=config, resume="allow", dir=str(run),
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )  # fmt: skip
        self.id = str(self._run.id)

    def log(self, step: int, values: dict[str, float], pictures: dict[str, Path]) -> None:
        """Add what was logged at a step; steps come in their order."""
        shown = {f"online/{name}": self._image(str(path)) for name, path in pictures.items()}
        self._run.log(values | shown, step=step)
        self._given = step

    def close(self, finished: bool) -> None:
        """End this copying; whether the run itself has ended, too."""
        self._run.finish()
        self.done = self._given


class MLflow:
    """MLflow, at `$MLFLOW_TRACKING_URI`; the project is its experiment.

    `done` is the last step whose values it has acknowledged.
    """

    done = 0

    def __init__(self, run: Path, project: str, id: str | None, config: dict[str, Any]) -> None:
        mlflow = _package("mlflow")
        self._client, self._metric = mlflow.MlflowClient(), mlflow.entities.Metric
        self._waiting: list[Any] = []
        if id is None:
            known = self._client.get_experiment_by_name(project)
            of = known.experiment_id if known else self._client.create_experiment(project)
            id = str(self._client.create_run(of, run_name=run.name).info.run_id)
            for key, value in _flat(config):
                self._client.log_param(id, key, value)
        self.id = id

    def log(self, step: int, values: dict[str, float], pictures: dict[str, Path]) -> None:
        """Add what was logged at a step; its pictures first, as a second time replaces them."""
        for path in pictures.values():
            self._client.log_artifact(self.id, str(path), PICTURES)
        now = int(1000 * time.time())
        self._waiting += [self._metric(name, value, now, step) for name, value in values.items()]
        if len(self._waiting) >= _AT_ONCE:
            self._send()

    def _send(self) -> None:
        self._client.log_batch(self.id, metrics=self._waiting)
        self.done = max([self.done, *(metric.step for metric in self._waiting)])
        self._waiting = []

    def close(self, finished: bool) -> None:
        """End this copying."""
        self._send()
        self._client.set_terminated(self.id, "FINISHED" if finished else "RUNNING")


SERVICES: dict[str, type[WandB | MLflow]] = {"wandb": WandB, "mlflow": MLflow}
FOUND = {"wandb": ("wandb/settings", ".wandb/settings"), "mlflow": ("mlruns", "mlflow.db")}
"""Where a service's package looks in the working folder for the server that it sends to, MLflow
without a variable."""


def sync(service: str, run: Path, project: str | None = None) -> int:
    """Copy the steps of a run that a service does not have yet; returns how many these are.

    Raises:
        UserError: no such run, a copy in another project, the service's package is not installed,
            or others may say what it reads in the working folder.
    """
    metrics, path = run / "metrics.jsonl", run / SYNCED
    if not metrics.exists():
        raise UserError(
            f"{run}: has logged nothing (no {metrics.name}); is it the folder of a run?"
        )
    known: dict[str, Any] = read_record(path) if path.exists() else {}
    before = known.get(service, {"id": None, "step": 0})
    copied_to = before.get("project", project)
    if project not in (None, copied_to):
        raise UserError(
            f"{run}: {service} has it in the project {copied_to}; leave --project out, or move "
            f"{path} away to copy everything anew"
        )
    project = copied_to or "maect"
    new = [line for line in entries(metrics) if line["step"] > before["step"]]
    if not new and before["id"] is not None:
        return 0
    _check_working_folder(service)
    config = run / "config.yaml"
    settings = read_yaml(config) if config.exists() else {}
    copy = SERVICES[service](run, project, before["id"], settings)
    # At once: should this end early, the next call goes on with the same copy.
    record = {"id": copy.id, "step": before["step"], "project": project}
    write_record(path, known | {service: record})
    try:
        for line in new:
            step = int(line.pop("step"))
            files = (run / PICTURES).glob(f"*-{step:08d}.jpg")
            pictures = {file.name.rpartition("-")[0]: file for file in sorted(files)}
            copy.log(step, line.pop("timing") | line, pictures)
    finally:
        try:
            copy.close(is_finished(run))
        finally:  # also where the connection is gone
            record["step"] = max(record["step"], copy.done)
            write_record(path, known | {service: record})
    return len(new)


def _check_working_folder(service: str) -> None:
    """Refuse what others may have put there: wandb sends the user's key to the server it names."""
    if service == "mlflow" and os.environ.get("MLFLOW_TRACKING_URI"):
        return
    here = Path.cwd()
    for path in (here / name for name in FOUND[service]):
        if reason := exposed(path):
            pass
        elif here.stat().st_mode & stat.S_IWOTH:
            reason = f"{here}: every user may write there"
        elif os.path.lexists(path) and not is_trusted(path.lstat().st_uid):
            reason = f"{path}: made by {owner_name(path.lstat().st_uid)}"
        if reason:
            raise UserError(f"{reason}; {service} would read it, so start in a folder of your own")


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise UserError(f"{name} is not installed: uv pip install {name}") from None


def _flat(values: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings with dots in their names."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield before + key, value
