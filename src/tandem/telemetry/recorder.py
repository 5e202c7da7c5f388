"""What a rank tells the world about its run, apart from its heartbeats: nearly all of it from rank 0.

Rank 0 writes the journal, TensorBoard and the progress display, and sends its numbers to the node's agent
(or to the server in its own process), which owns the metrics. No call here waits for the GPU.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tandem.telemetry import messages, stragglers
from tandem.telemetry.clock import Clock
from tandem.telemetry.journal import Journal
from tandem.telemetry.messages import EndedSave, Readings
from tandem.telemetry.meter import Costs, DeviceMemory, Meter, StepTimes
from tandem.telemetry.progress import Progress
from tandem.telemetry.tensorboard import EventWriter
from tandem.timeouts import PROGRESS_SECONDS

log = logging.getLogger("tandem.run")

MAX_TIMES = 1000
"""Steps of an interval that a rank's typical step is taken from: the last ones of a longer interval."""

Send = Callable[[Mapping[str, object]], object]


class Agreement(Protocol):
    """The part of `agreement.Agreed` that is recorded."""

    @property
    def step(self) -> int: ...
    @property
    def loss(self) -> float: ...


class Gathering(Protocol):
    """The part of `world.Gathering` that is looked at: rows that may still be on their way."""

    def is_here(self) -> bool: ...
    def rows(self) -> list[list[float]]: ...


class Recorder:
    """One launch of one rank. `send` takes messages for `Metrics.apply`; `clock` says where it is."""

    def __init__(self, rank: int, batch_size: int, send: Send, clock: Clock, node: int = 0) -> None:
        self.clock = clock
        self.rank, self.node, self._batch_size, self._send = rank, node, batch_size, send
        self.meter = Meter()
        self._journal: Journal | None = None
        self._progress: Progress | None = None
        self._tensorboard: EventWriter | None = None
        self._steps_per_epoch, self._steps_planned = 1, 1
        self._loss_sum, self._loss_count = 0.0, 0
        self.loss = math.nan
        self.rate = 0.0
        self.scores: dict[str, float] = {}
        self._scores_step = -1
        self._times: deque[StepTimes] = deque(maxlen=MAX_TIMES)
        self._unsent: list[StepTimes] = []
        self._watch = stragglers.StragglerWatch()
        self._gathering: Gathering | None = None
        self._costs = Costs()
        self._memory: DeviceMemory | None = None
        self._steps_sent, self._sent_at = 0, 0.0

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
        self._steps_per_epoch, self._steps_planned = steps_per_epoch, steps_planned
        self._journal, self._progress, self._tensorboard = journal, progress, tensorboard
        self.clock.resume(step)
        self._steps_sent = step
        plan = {"step": step, "steps_per_epoch": steps_per_epoch, "steps_planned": steps_planned}
        self.message({"begin": plan})
        self._send_gauges(
            tandem_steps_planned=steps_planned,
            tandem_epochs_planned=steps_planned / steps_per_epoch,
            **self._position(),
        )

    def costs(self, costs: Costs) -> None:
        """What a step costs; what is not known keeps its metrics away."""
        self._costs = costs
        if costs.device_flops:
            self._send_gauges(tandem_peak_flops=costs.devices * costs.device_flops)

    @property
    def known_costs(self) -> Costs:
        """What `costs` was told last, or what the loaded state says of it."""
        return self._costs

    @property
    def step(self) -> int:
        """Finished steps."""
        return self.clock.step

    def end_step(self, agreed: Agreement | None, rate: float) -> None:
        """One more step is finished; on GPUs its times and what was agreed in it come in later."""
        self.timed(self.clock.end_step())
        self.rate = rate
        self.late(agreed)
        self._look_at_ranks()
        if self._progress is not None:
            self._progress.advance(self.step)
        if time.monotonic() - self._sent_at >= PROGRESS_SECONDS:
            self._send_progress()

    def timed(self, times: Sequence[StepTimes]) -> None:
        """Where the time of some steps went, whenever that is known."""
        for each in times:
            self.meter.step(self._batch_size, each)
        self._times += times
        if self.rank == 0:
            self._unsent += times

    def late(self, agreed: Any) -> Any:
        """Take the loss of what was agreed, whenever it arrives, if it is finite; returns it."""
        if agreed is not None and math.isfinite(agreed.loss):
            self._loss_sum += agreed.loss
            self._loss_count += 1
        return agreed

    def state(self) -> dict[str, float]:
        """The open log interval and the costs, for a checkpoint.

        A resumed run then logs what a calm one logs, and counts no FLOPs again.
        """
        return {
            "loss_sum": self._loss_sum,
            "loss_count": self._loss_count,
            "flops_per_sample": self._costs.flops_per_sample,
            "devices": self._costs.devices,
        }

    def load(self, state: Mapping[str, float]) -> None:
        """Go on with a log interval that was open when a checkpoint was saved."""
        self._loss_sum, self._loss_count = state.get("loss_sum", 0.0), int(state.get("loss_count", 0))
        self._costs = Costs(state.get("flops_per_sample", 0.0), devices=int(state.get("devices", 0)))

    def own_times(self) -> list[float]:
        """This rank's row for the gather that names the slowest rank; begins a new interval of times."""
        self.timed(self.clock.drain())
        row = stragglers.row_of(self.node, self._times)
        self._times.clear()
        return row

    def log_interval(self, step: int, readings: Readings, gathering: Gathering) -> None:
        """The log cadence is due: one line, one row, one message. `gathering`: every rank's `own_times`."""
        interval = self.meter.interval()
        self.loss = self._loss_sum / self._loss_count if self._loss_count else math.nan
        self._loss_sum, self._loss_count = 0.0, 0
        if readings.memory is not None:
            self._send(messages.memory(readings.memory, self._memory))
            self._memory = readings.memory
        self._look_at_ranks(wait=True)
        self._gathering = gathering
        self._look_at_ranks()
        if self.rank != 0:
            return
        numbers = {
            "loss": self.loss,
            "learning_rate": self.rate,
            "samples_per_second": interval.samples_per_second,
            **({"grad_norm": readings.grad_norm} if readings.grad_norm is not None else {}),
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
        self._send({"point": {"step": step, "time": time.time(), **numbers, "phases": interval.phases}})
        self._send(messages.optimisation(self.loss, self.rate, readings))
        hidden = interval.steps * readings.hidden_sync_seconds  # of one sampled step, taken for all
        self._send({"inc": [["tandem_gradient_sync_seconds", {"overlap": "hidden"}, hidden]]})
        self._send_progress()

    def _look_at_ranks(self, wait: bool = False) -> None:
        """Judge the rows that every rank has sent, once they are all here."""
        if self._gathering is None or not (wait or self._gathering.is_here()):
            return
        rows, self._gathering = self._gathering.rows(), None
        if self.rank == 0:
            self._judge_ranks(stragglers.from_rows(rows))

    def _judge_ranks(self, ranks: list[stragglers.RankTimes]) -> None:
        if not any(each.own for each in ranks):  # an interval without a step whose times are known
            return
        verdict = stragglers.judge(ranks)
        self._send(stragglers.rows_for_metrics(ranks, verdict))
        self._send(stragglers.rows_for_page(ranks, verdict))
        news = self._watch.news(verdict)
        if news is not None:
            log.warning("%s", news)
            self.event(
                "straggler",
                rank=news.rank,
                node=news.node,
                phase=news.phase,
                own_seconds=news.slowest,
                median_seconds=news.median,
            )

    def not_finite(self) -> None:
        """The loss is no number and the run ends for it: shown now, for no log line follows."""
        self.loss = math.nan
        self.message({"set": [["tandem_loss", {"split": "train"}, math.nan]]})

    def data_error(self, reason: str) -> None:
        """A sample could not be read (every rank tells its own)."""
        self._send({"inc": [["tandem_data_errors", {"reason": reason}, 1]]})

    def evaluated(self, step: int, scores: Mapping[str, float]) -> None:
        """Scores over the whole evaluation set, equal on all ranks."""
        self.scores, self._scores_step = dict(scores), step
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
        self._send({"point": {"step": step, "time": time.time(), "eval": self.scores}})

    def scores_at(self, step: int) -> dict[str, float]:
        """What the evaluation at this very step gave; nothing when the last one was at another."""
        return self.scores if self._scores_step == step else {}

    def saved(self, save: EndedSave) -> None:
        """A save ended; called from the thread that wrote it."""
        if save.bytes is None:
            self.event("checkpoint_failed", step=save.step)
        else:
            self.event("checkpoint", step=save.step, seconds=round(save.seconds, 3), bytes=save.bytes)
        self._send(messages.saved(save, time.time()))

    def event(self, kind: str, **fields: object) -> None:
        """One line in events.jsonl, and on the page (rank 0)."""
        if self._journal is not None:
            self._journal.event(kind, **fields)
        if self.rank == 0:
            self._send({"event": {"time": time.time(), "kind": kind, **fields}})

    def message(self, message: Mapping[str, object]) -> None:
        """Anything else for the metrics (rank 0)."""
        if self.rank == 0:
            self._send(message)

    def close(self) -> None:
        """Send what is left and let go of the displays."""
        self._look_at_ranks(wait=True)
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
        self._sent_at = time.monotonic()
        new_steps, self._steps_sent = self.step - self._steps_sent, self.step
        loss, rate = self.loss if math.isfinite(self.loss) else None, self.meter.samples_per_second
        rows: list[object] = [[name, {}, value] for name, value in self._position().items()]
        if new_steps:
            rows.append(["tandem_last_step_timestamp_seconds", {}, time.time()])
            if self.meter.samples_per_second > 0:
                left = (self._steps_planned - self.step) * self._batch_size / self.meter.samples_per_second
                rows.append(["tandem_estimated_completion_timestamp_seconds", {}, time.time() + left])
        self._send(
            {
                "done": {"step": self.step, "loss": loss, "samples_per_second": round(rate, 1)},
                "set": rows,
                "inc": [
                    ["tandem_steps", {}, new_steps],
                    ["tandem_samples", {}, new_steps * self._batch_size],
                    [
                        "tandem_model_flops",
                        {},
                        new_steps * round(self._batch_size * self._costs.flops_per_sample),
                    ],
                ],
            }
        )
        times, self._unsent = self._unsent, []
        for message in messages.times(times, self._costs.sync_bytes):
            self._send(message)
