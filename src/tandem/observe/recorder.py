"""What a rank tells the world about its run: heartbeats from every rank, everything else from rank 0.

Rank 0 writes the journal, TensorBoard and the progress display, and sends its numbers to the node's agent
(or to the server in its own process), which owns the metrics. No call here waits for the GPU.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from tandem.meter import Activities, Meter
from tandem.observe.journal import Journal
from tandem.observe.progress import Progress
from tandem.observe.tensorboard import EventWriter

HEARTBEAT_SECONDS = 0.5
STATE_OF = {
    "startup": "starting",
    "rendezvous": "rendezvous",
    "resume": "resuming",
    "train": "training",
    "eval": "evaluating",
    "checkpoint": "checkpointing",
    "drain": "draining",
}

Send = Callable[[Mapping[str, object]], object]


class Phases(Protocol):
    """Host seconds of a step by phase, as the stepper measured them."""

    transfer: float
    forward: float
    backward: float
    optimizer: float


class EndedSave(Protocol):
    """The part of `writer.SaveOutcome` that is recorded."""

    @property
    def step(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def held_seconds(self) -> float: ...
    @property
    def bytes(self) -> int | None: ...


class Agreement(Protocol):
    """The part of `world.Agreed` that is recorded."""

    @property
    def step(self) -> int: ...
    @property
    def loss(self) -> float: ...


class Recorder:
    """One launch of one rank. `send` takes messages for `Metrics.apply`, and heartbeats."""

    def __init__(self, rank: int, batch_size: int, send: Send) -> None:
        self.rank, self._batch_size, self._send = rank, batch_size, send
        self.meter = Meter()
        self._clock = time.monotonic
        self.activities = Activities(self._clock())
        self._journal: Journal | None = None
        self._progress: Progress | None = None
        self._tensorboard: EventWriter | None = None
        self._steps_per_epoch, self._steps_planned, self.step = 1, 1, 0
        self._loss_sum, self._loss_count = 0.0, 0
        self.loss = math.nan
        self.rate = 0.0
        self.scores: dict[str, float] = {}
        self._durations: list[float] = []
        self._step_began = self._data_came = self._last_beat = self._clock()
        self._steps_sent = 0
        self._activity = "startup"

    def begin_run(
        self,
        step: int,
        steps_per_epoch: int,
        steps_planned: int,
        journal: Journal | None,
        progress: Progress | None,
        tensorboard: EventWriter | None,
    ) -> None:
        """The plan is known; rank 0 hands in where it writes to, the other ranks None."""
        self.step, self._steps_per_epoch, self._steps_planned = step, steps_per_epoch, steps_planned
        self._journal, self._progress, self._tensorboard = journal, progress, tensorboard
        self._send_gauges(
            tandem_steps_planned=steps_planned,
            tandem_epochs_planned=steps_planned / steps_per_epoch,
            **self._position(),
        )

    @contextmanager
    def activity(self, name: str) -> Iterator[None]:
        """Charge wall time inside to `name`, and show the state that goes with it."""
        before = self.activities.switch(name, self._clock())
        self._enter(name)
        try:
            yield
        finally:
            self.activities.switch(before, self._clock())
            self._enter(before)

    def _enter(self, activity: str) -> None:
        self._activity = activity
        self._heartbeat()
        if self.rank == 0:
            self._send({"state": STATE_OF[activity]})

    def begin_step(self) -> None:
        self._step_began = self._clock()

    def got_data(self) -> None:
        self._data_came = self._clock()
        self.meter.add("data", self._data_came - self._step_began)

    def end_step(self, step: int, phases: Phases, agreed: Agreement | None, rate: float) -> None:
        """`step` steps are finished; `agreed` is of this step, or on GPUs of the one before."""
        now = self._clock()
        for name in ("transfer", "forward", "backward", "optimizer"):
            self.meter.add(name, getattr(phases, name))
        self.meter.step(self._batch_size, now - self._step_began)
        self._durations.append(now - self._step_began)
        self.step, self.rate = step, rate
        self.late(agreed)
        if self._progress is not None:
            self._progress.advance(step)
        if now - self._last_beat >= HEARTBEAT_SECONDS:
            self._heartbeat()
            self._send_progress()

    def late(self, agreed: Any) -> Any:
        """Take the loss of what was agreed, whenever it arrives; returns it."""
        if agreed is not None:
            self._loss_sum += agreed.loss
            self._loss_count += 1
        return agreed

    def log_interval(self, step: int, grad_norm: Any) -> None:
        """The log cadence is due: one line, one row, one message."""
        interval = self.meter.interval()
        self.loss = self._loss_sum / self._loss_count if self._loss_count else self.loss
        self._loss_sum, self._loss_count = 0.0, 0
        if self.rank != 0:
            return
        norm = float(grad_norm) if grad_norm is not None else None
        numbers = {
            "loss": self.loss,
            "learning_rate": self.rate,
            "samples_per_second": interval.samples_per_second,
            **({"grad_norm": norm} if norm is not None else {}),
        }
        epoch = step / self._steps_per_epoch
        if self._journal is not None:
            self._journal.metrics(step, epoch=epoch, **numbers, phases=interval.phases)
        if self._tensorboard is not None:
            self._tensorboard.scalars(step, {f"train/{name}": value for name, value in numbers.items()})
        if self._progress is not None:
            self._progress.report(
                step,
                epoch=-(-step // self._steps_per_epoch),
                loss=self.loss,
                samples_per_second=interval.samples_per_second,
            )
        self._send(
            {
                "set": [
                    ["tandem_loss", {"split": "train"}, self.loss],
                    ["tandem_learning_rate", {"group": "0"}, self.rate],
                    *([["tandem_grad_norm", {}, norm]] if norm is not None else []),
                ],
                "inc": [
                    ["tandem_step_phase_seconds", {"phase": phase}, seconds]
                    for phase, seconds in interval.phases.items()
                ],
            }
        )
        self._send_progress()

    def evaluated(self, step: int, scores: Mapping[str, float]) -> None:
        """Scores over the whole evaluation set, equal on all ranks."""
        self.scores = dict(scores)
        if self.rank != 0:
            return
        if self._journal is not None:
            self._journal.metrics(step, epoch=step / self._steps_per_epoch, eval=self.scores)
        if self._tensorboard is not None:
            self._tensorboard.scalars(step, {f"eval/{name}": value for name, value in self.scores.items()})
        if self._progress is not None:
            text = ", ".join(f"{name} {value:.4f}" for name, value in self.scores.items())
            self._progress.note(f"evaluation after step {step}: {text}")
        rows: list[object] = [["tandem_eval_score", {"score": name}, value] for name, value in scores.items()]
        if "loss" in scores:
            rows.append(["tandem_loss", {"split": "eval"}, scores["loss"]])
        self._send({"set": rows})

    def saved(self, save: EndedSave) -> None:
        """A save ended; called from the thread that wrote it."""
        if save.bytes is None:
            self.event("checkpoint_failed", step=save.step)
            self._send({"inc": [["tandem_checkpoint_save_failures", {}, 1]]})
            return
        self.event("checkpoint", step=save.step, seconds=round(save.seconds, 3), bytes=save.bytes)
        self._send(
            {
                "inc": [
                    ["tandem_checkpoint_saves", {}, 1],
                    ["tandem_checkpoint_written_bytes", {}, save.bytes],
                    ["tandem_checkpoint_blocked_seconds", {}, save.held_seconds],
                ],
                "observe": [["tandem_checkpoint_save_duration_seconds", {}, save.seconds]],
                "set": [
                    ["tandem_checkpoint_size_bytes", {}, save.bytes],
                    ["tandem_checkpoint_last_success_timestamp_seconds", {}, time.time()],
                    ["tandem_checkpoint_last_success_step", {}, save.step],
                ],
            }
        )

    def event(self, kind: str, **fields: object) -> None:
        """One line in events.jsonl (rank 0)."""
        if self._journal is not None:
            self._journal.event(kind, **fields)

    def message(self, message: Mapping[str, object]) -> None:
        """Anything else for the metrics (rank 0)."""
        if self.rank == 0:
            self._send(message)

    def close(self) -> None:
        """Send what is left and let go of the displays."""
        self._send_progress()
        if self._progress is not None:
            self._progress.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _position(self) -> dict[str, float]:
        return {
            "tandem_global_step": self.step,
            "tandem_epoch": self.step / self._steps_per_epoch,
            "tandem_progress_ratio": self.step / self._steps_planned,
        }

    def _send_gauges(self, **values: float) -> None:
        if self.rank == 0:
            self._send({"set": [[name, {}, value] for name, value in values.items()]})

    def _send_progress(self) -> None:
        if self.rank != 0:
            return
        new_steps, self._steps_sent = self.meter.steps - self._steps_sent, self.meter.steps
        durations, self._durations = self._durations, []
        rows = [[name, {}, value] for name, value in self._position().items()]
        if new_steps:
            rows.append(["tandem_last_step_timestamp_seconds", {}, time.time()])
            if self.meter.samples_per_second > 0:
                left = (self._steps_planned - self.step) * self._batch_size / self.meter.samples_per_second
                rows.append(["tandem_estimated_completion_timestamp_seconds", {}, time.time() + left])
        spent = self.activities.take(self._clock())
        self._send(
            {
                "set": rows,
                "inc": [
                    ["tandem_steps", {}, new_steps],
                    ["tandem_samples", {}, new_steps * self._batch_size],
                    *[
                        ["tandem_activity_seconds", {"activity": name}, value]
                        for name, value in spent.items()
                    ],
                ],
                "observe": [["tandem_step_duration_seconds", {}, value] for value in durations[:500]],
            }
        )

    def _heartbeat(self) -> None:
        self._last_beat = self._clock()
        self._send(
            {
                "heartbeat": {
                    "rank": self.rank,
                    "step": self.step,
                    "steps_planned": self._steps_planned,
                    "activity": self._activity,
                    "loss": self.loss if math.isfinite(self.loss) else None,
                    "samples_per_second": round(self.meter.samples_per_second, 1),
                }
            }
        )
