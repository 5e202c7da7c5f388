"""Send the journal's rows that a tracker does not have yet; runs in a separate process.

When a run resumes from an earlier step, the journal is rewound, so it has each step once.
RUN_DIR/tracker.json has the tracker's ID of the run, and how much was sent. A repeated step is not sent
again.
"""

import fcntl
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

from tandem import layout
from tandem.bounded_reader import LINE_BYTES, MARK, MOST_STRAY_LINES, POINT, opened, parsed, typed
from tandem.errors import ConfigError, TandemError
from tandem.log import setup
from tandem.report.about import About
from tandem.rotation import LOG_BYTES, rotate
from tandem.run.directory import RunDir
from tandem.telemetry.journal import write_json_atomic
from tandem.timeouts import (
    TRACKER_LONGEST_PAUSE_SECONDS,
    TRACKER_ORPHAN_SECONDS,
    TRACKER_RANKS_SECONDS,
    TRACKER_SECONDS,
)

log = logging.getLogger("tandem.tracker")

# Send rows of the journal to MLflow and Weights & Biases; their packages are imported when needed.
#
# Their own variables set the server and the credentials: MLFLOW_TRACKING_URI, WANDB_MODE and so on.

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
    """The facts that a tracker needs to open a run.

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
        """Return once the tracker has the rows; sending rows again does no harm."""

    def end(self, state: str, summary: Mapping[str, object]) -> None:
        """Close the run. `state`: finished, stopped, failed, or killed for a launch that reported none."""


def check_tracker(name: str | None) -> None:
    """Raise ConfigError if the package of this tracker is not installed."""
    if name is not None and find_spec(name) is None:
        raise ConfigError(
            f"--tracker {name} needs a package that is not installed here; "
            f"run: pip install 'tandem-train[{name}]', or omit --tracker"
        )


def copied_from(run: RunDir) -> Path | None:
    """Return the run directory on this machine of which `run` is a copy with the same run at a tracker.

    Call it before config.json is replaced, which has the path of the last launch. A directory that has moved
    has no such original, so it continues its run at the tracker.
    """
    original = Path(str(run.files().read(layout.CONFIG).get("run_dir") or ""))
    with suppress(OSError, ValueError):
        if original.is_absolute() and not original.samefile(run.folder):
            marks = RunDir(original).files().read(layout.TRACKER)
            own = run.files().read(layout.TRACKER)
            if any(_kept(mark).ours == _kept(own.get(name)).ours for name, mark in marks.items()):
                return original
    return None


def open_tracker(name: str, beginning: RunStart) -> Tracker:
    """Create the run at the tracker, or continue it."""
    return MLflow(beginning) if name == "mlflow" else Wandb(beginning)


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a line of metrics.jsonl, named as in TensorBoard: train/loss, eval/accuracy."""
    groups = {"eval": "eval", "scores": "train", "phases": "phases"}
    found: dict[str, object] = {}
    for name, value in record.items():
        if name in groups:
            found |= {f"{groups[name]}/{inner}": number for inner, number in (value or {}).items()}
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
            # The earlier launch closed the run at its end.
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
        # Settings are not sent on creation: here, a failure is retried together with the rows.
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

        Params cannot change, so a value that a later launch changed becomes a tag.
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


KILLED = "killed"
"""The state of a launch that reported no state."""
ROWS_AT_ONCE = 100
LONGEST_REASON = 200


@dataclass(frozen=True)
class UploadMark:
    """The progress of a tracker's run: `sent` rows in all; the last one is row number `rows` of `step`.

    `ours` and `run`: the run's ID here, and at the tracker.
    """

    ours: str
    run: str | None = None
    step: int = -1
    rows: int = 0
    sent: int = 0


def _kept(found: Any) -> UploadMark:
    """Return the mark from a file, or a new one if it is missing or invalid."""
    with suppress(ValueError):
        known, left_out = typed(found, MARK)
        if not left_out:
            return UploadMark(**known)
    return UploadMark(uuid4().hex[:12])


class JournalReader:
    """Reads a metrics.jsonl that grows, and whose last lines are removed when the run is rewound."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._last = b""
        self._at = (-1, 0)

    def read(self) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
        """Yield ((step, number of the row in that step, from 1), row) for all new rows."""
        with suppress(OSError), opened(self._path.parent, self._path.name) as file:
            file.seek(self._offset - len(self._last))
            # Lines were removed; a repeated row has a different time.
            if file.read(len(self._last)) != self._last:
                self._offset = 0
                self._last = b""
                self._at = (-1, 0)
                file.seek(0)
            stray = 0
            # A line without an end is still being written, and is read in the next round.
            while (line := file.readline(LINE_BYTES)).endswith(b"\n") and stray < MOST_STRAY_LINES:
                self._offset = self._offset + len(line)
                self._last = line
                try:
                    record, _ = typed(parsed(line), POINT)
                except ValueError:  # incomplete, because its writer was killed
                    stray += 1
                    continue
                step = record["step"]
                self._at = (step, self._at[1] + 1 if step == self._at[0] else 1)
                yield self._at, record


class Upload(Protocol):
    """Sends a run to a server. `send` may raise any error; unsent rows are kept."""

    def send(self, ended: str | None = None) -> int: ...

    def words(self, error: Exception) -> str: ...


class TrackerUpload:
    """Sends the unsent part of a run to the tracker `name`."""

    def __init__(self, run: RunDir, name: str, secrets: list[str]) -> None:
        self._run = run
        self._name = name
        self._about = About(run.folder, secrets)
        self.files = run.files()
        self._mark = _kept(None if copied_from(run) else self.files.read(layout.TRACKER).get(name))
        self._journal = JournalReader(run.folder / layout.METRICS)
        self._tracker: Tracker | None = None
        self._waiting: list[tuple[UploadMark, MetricRow]] = []

    def send(self, ended: str | None = None) -> int:
        """Send new rows, and the final state of a launch that has ended; return how many rows.

        Raises the tracker's errors, after which nothing is lost.
        """
        tracker = self._opened()
        before = self._mark.sent
        while waiting := self._next():
            tracker.rows([row for _, row in waiting])
            # Record this only now that the rows are accepted. If this process dies earlier, they are sent
            # again, which does no harm.
            self._keep(waiting[-1][0])
            self._waiting = []
        if ended is not None:
            self._end(ended)
        return self._mark.sent - before

    def _end(self, state: str) -> None:
        is_of_this = state != KILLED  # otherwise, the summary is from an earlier launch
        summary = self._about.hidden(self.files.read(layout.SUMMARY)) if is_of_this else {}
        scores = {f"eval.{name}": value for name, value in (summary.pop("eval", None) or {}).items()}
        self._opened().end(state, {**summary, **scores, "state": state})

    def catch_up(self) -> str:
        """Send all of a finished run; return a one-line result. Raises TandemError."""
        try:
            rows = self.send(self.files.read(layout.SUMMARY).get("state") or KILLED)
        except Exception as error:  # a tracker's package may raise anything
            raise TandemError(
                f"{self._name} does not accept rows: {self.words(error)}; try again later"
            ) from error
        return f"{rows} rows sent to {self._name}; {self._mark.sent} in total"

    def words(self, error: Exception) -> str:
        """Return a short description of the error; it may contain an address with a password."""
        return self._about.hide(" ".join(str(error).split()))[:LONGEST_REASON] or type(error).__name__

    def _opened(self) -> Tracker:
        if self._tracker is None:
            about = self._about.read(self.files)
            settings = {str(row["name"]): row["value"] for row in about["settings"]}
            # Write it first: if this process dies before the tracker's ID is known, the next one finds the
            # run by `ours`.
            self._keep(self._mark)
            folder = self._run.folder
            known = RunStart(self._mark.ours, self._mark.run, folder.name, settings, folder)
            self._tracker = open_tracker(self._name, known)
            self._keep(replace(self._mark, run=self._tracker.id))
        return self._tracker

    def _next(self) -> list[tuple[UploadMark, MetricRow]]:
        """Return the rows to send next: those of a failed attempt, else new ones."""
        if not self._waiting:
            self._waiting = list(islice(self._unsent(), ROWS_AT_ONCE))
        return self._waiting

    def _unsent(self) -> Iterator[tuple[UploadMark, MetricRow]]:
        mark = self._mark
        for (step, rows), record in self._journal.read():
            if (step, rows) > (mark.step, mark.rows):
                row = MetricRow(step, record.get("time") or 0.0, numbers_of(record), mark.sent)
                mark = replace(mark, step=step, rows=rows, sent=mark.sent + 1)
                yield mark, row

    def _keep(self, mark: UploadMark) -> None:
        self._mark = mark
        # A run may have had another tracker before, whose mark must stay.
        others = self._run.files().read(layout.TRACKER)
        write_json_atomic(self._run.folder / layout.TRACKER, {**others, self._name: asdict(mark)})


def follow(sending: Upload, name: str, until: Callable[[float], str | None]) -> bool:
    """Send until `until(seconds)` returns the launch's final state; return True if everything was sent.

    If a tracker does not answer, one warning is logged, and it is retried at increasing intervals. After the
    end, a tracker that has answered before is tried twice.
    """
    failing = False
    pause = 0.0
    ended: str | None = None
    while True:
        # Read it before `send`, which then includes all rows of a launch that has ended.
        ended = until(pause) or ended
        try:
            rows = sending.send(ended)
            if ended is not None:
                return True
            if failing:
                log.info("%s is back; sent %d rows that had been kept", name, rows)
            failing = False
            pause = TRACKER_SECONDS
        except Exception as error:  # a tracker's package may raise anything
            if failing and ended is not None:
                return False
            if not failing:
                say = "%s does not accept rows (%s); training continues, and unsent rows are kept"
                log.warning(say, name, sending.words(error))
            failing = True
            pause = min(max(2 * pause, TRACKER_SECONDS), TRACKER_LONGEST_PAUSE_SECONDS)


def follow_launch(sending: Upload, name: str, config: Mapping[str, object], run: RunDir) -> bool:
    """Run `follow` until the launch closes this process's standard input, after writing its final state.

    Output of the tracker's packages goes to log/tracker.log.
    """
    setup(run.node_log(0), None, 0, True, config.get("log_format") == "json")
    stages: Queue[str] = Queue()

    def wait_for_end() -> None:
        ended = sys.stdin.read().strip()
        if not ended:
            time.sleep(TRACKER_RANKS_SECONDS)
        stages.put(ended or KILLED)
        time.sleep(TRACKER_ORPHAN_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)  # a server that hangs would keep the next launch from sending

    Thread(target=wait_for_end, daemon=True).start()

    def until(seconds: float) -> str | None:
        with suppress(Empty):
            return stages.get(timeout=seconds) if seconds else stages.get_nowait()
        return None

    path = run.logs / layout.TRACKER_LOG
    rotate(path, LOG_BYTES)
    with path.open("a") as own, redirect_stdout(own), redirect_stderr(own):
        return follow(sending, name, until)


@contextmanager
def exclusive_sender(folder: Path, wait: bool) -> Iterator[None]:
    """Ensure that only one process sends: a killed launch's sender may still run. Raises ConfigError."""
    # The lock needs no file in the run, and the kernel releases it however the process ends (flock(2)).
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(
            f"the launch of {folder} is still sending its rows; wait until it has ended"
        ) from error
    except OSError:
        pass  # the volume has no such locks
    try:
        yield
    finally:
        os.close(descriptor)


def chosen(config: Mapping[str, object], asked: str | None) -> str:
    """Return the requested tracker, else the run's own. Raises ConfigError."""
    name = asked or str(config.get("tracker") or "").removeprefix("tensorboard").lstrip(",")
    if not name:
        raise ConfigError("this run has no tracker; use --tracker mlflow, --tracker wandb or --tracker otel")
    return name
