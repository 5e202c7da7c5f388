"""Send rows of the journal to MLflow and Weights & Biases; their packages are imported when needed.

Their own variables set the server and the credentials: MLFLOW_TRACKING_URI, WANDB_MODE and so on.
"""

import re
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tandem.errors import ConfigError

TRACKERS = ("mlflow", "wandb")
MOST_AT_ONCE = {"metrics": 1000, "params": 100, "tags": 100}  # limits of an MLflow server
LONGEST = 5000
OURS = "tandem.run"


class MetricRow(NamedTuple):
    """A line of metrics.jsonl; `number` counts the rows of the tracker's run, from 0."""

    step: int
    time: float
    numbers: Mapping[str, float]
    number: int


class RunStart(NamedTuple):
    """What a tracker needs to open a run.

    `ours` identifies the run before the tracker has an ID for it; `known` is the tracker's ID, once it is
    known. `folder` is the directory for local files.
    """

    ours: str
    known: str | None
    title: str
    settings: Mapping[str, object]
    folder: Path


class Tracker(Protocol):
    """A run at a tracker, open from its creation to `end`. Each call may raise what its package raises."""

    id: str

    def rows(self, rows: Sequence[MetricRow]) -> None:
        """Return when the tracker has the rows; sending rows again does no harm."""

    def end(self, state: str, summary: Mapping[str, object]) -> None:
        """Close the run. `state`: finished, stopped, failed, or killed for a launch that reported none."""


def check(name: str | None) -> None:
    """Raise ConfigError if the package of this tracker is not installed."""
    if name is not None and find_spec(name) is None:
        raise ConfigError(
            f"--tracker {name} needs a package that is not installed here; "
            f"run: pip install 'tandem-train[{name}]', or omit --tracker"
        )


def begin(name: str, beginning: RunStart) -> Tracker:
    """Create the run at the tracker, or continue it."""
    return MLflow(beginning) if name == "mlflow" else Wandb(beginning)


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a line of metrics.jsonl, named as in TensorBoard: train/loss, eval/accuracy."""
    found: dict[str, object] = {}
    for name, value in record.items():
        if name == "eval":
            found |= {f"eval/{score}": number for score, number in (value or {}).items()}
        elif name == "scores":
            found |= {f"train/{score}": number for score, number in (value or {}).items()}
        elif name == "phases":
            found |= {f"phases/{phase}": number for phase, number in (value or {}).items()}
        elif name == "epoch":
            found[name] = value
        elif name not in ("step", "time"):
            found[f"train/{name}"] = value
    # JSON has no NaN, so the journal has it as text (`journal.plain`).
    return {name: float(value) for name, value in found.items() if isinstance(value, str | int | float)}


class MLflow:
    """A run on an MLflow server. A row that is sent twice appears once, because it has the journal's time."""

    def __init__(self, beginning: RunStart) -> None:
        import mlflow
        from mlflow import entities

        self._entities = entities
        self._client = mlflow.MlflowClient()
        self._settings: Mapping[str, object] | None = beginning.settings
        if beginning.known is not None:
            self.id = beginning.known
            # The end of the earlier launch has closed the run.
            self._client.update_run(self.id, status="RUNNING")
            return
        experiment = mlflow.tracking.fluent._get_experiment_id()  # honors MLFLOW_EXPERIMENT_NAME
        made = self._client.search_runs([experiment], f"tags.`{OURS}` = '{beginning.ours}'")
        for double in made[1:]:  # created by requests whose responses were lost
            self._client.delete_run(double.info.run_id)
        tags = {OURS: beginning.ours}
        run = made[0] if made else self._client.create_run(experiment, None, tags, beginning.title)
        self.id = run.info.run_id

    def rows(self, rows: Sequence[MetricRow]) -> None:
        # Not sent on creation: here, a failure is retried together with the rows.
        if self._settings is not None:
            self._say_settings(self._settings)
            self._settings = None
        self._log("metrics", [
            # MLflow counts time in milliseconds.
            self._entities.Metric(_name(name), value, int(row.time * 1000), row.step)
            for row in rows for name, value in row.numbers.items()
        ])  # fmt: skip

    def _say_settings(self, settings: Mapping[str, object]) -> None:
        """Send settings as params.

        Those cannot change, so a value that a later launch changed becomes a tag.
        """
        there = self._client.get_run(self.id).data.params
        texts = {_name(name): str(value)[:LONGEST] for name, value in settings.items()}
        new = [self._entities.Param(name, text) for name, text in texts.items() if name not in there]
        self._log("params", new)
        changed = {name: text for name, text in texts.items() if there.get(name, text) != text}
        self._log("tags", [self._entities.RunTag(f"now.{name}", text) for name, text in changed.items()])

    def end(self, state: str, summary: Mapping[str, object]) -> None:
        # A launch that ends before its first row has not sent its settings yet.
        self.rows([])
        facts = {"state": state, **summary}
        self._log("tags", [
            self._entities.RunTag(f"tandem.{name}", str(value)[:LONGEST])
            for name, value in facts.items() if value is not None
        ])  # fmt: skip
        status = {"finished": "FINISHED", "failed": "FAILED"}.get(state, "KILLED")
        self._client.set_terminated(self.id, status, int(time.time() * 1000))

    def _log(self, kind: str, entries: Sequence[object]) -> None:
        most = MOST_AT_ONCE[kind]
        for start in range(0, len(entries), most):
            self._client.log_batch(self.id, **{kind: entries[start : start + most]})


def _name(name: str) -> str:
    """Return a name that MLflow accepts."""
    return re.sub(r"[^\w./ -]", "_", name)


class Wandb:
    """A run at Weights & Biases, whose package buffers in its own files.

    Its step counts rows, because it rejects a repeated step, and a step with an evaluation has two rows.
    Curves are drawn over `step`.
    """

    def __init__(self, beginning: RunStart) -> None:
        import wandb

        if (beginning.folder / "wandb").is_symlink():
            raise ConfigError(
                f"{beginning.folder}/wandb is a link; remove it: files would be written elsewhere"
            )
        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        self.id = beginning.ours
        self._run = wandb.init(
            id=self.id, name=beginning.title, dir=str(beginning.folder), resume="allow", settings=quiet
        )
        self._run.config.update(dict(beginning.settings), allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def rows(self, rows: Sequence[MetricRow]) -> None:
        for row in rows:
            self._run.log({"step": row.step, **row.numbers}, step=row.number, commit=True)

    def end(self, state: str, summary: Mapping[str, object]) -> None:
        self._run.summary.update({"state": state, **summary})
        self._run.finish(exit_code=0 if state == "finished" else int(str(summary.get("exit_code") or 1)))
