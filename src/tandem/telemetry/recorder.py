"""Report everything about a run except heartbeats; nearly all reports are from rank 0.

Rank 0 writes the journal, TensorBoard files and the progress display. It sends its values to the node's agent
(or to the server in its own process), which owns the metrics. No method here waits for the GPU.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem.log import reporting
from tandem.telemetry import metrics
from tandem.telemetry.clock import Clock
from tandem.telemetry.displays import EventWriter, Progress
from tandem.telemetry.journal import Journal
from tandem.telemetry.messages import Event, Point, RunStarted, Samples, Send, StepsDone
from tandem.telemetry.meter import (
    PHASES,
    Consensus,
    Costs,
    DeviceMemory,
    LogLine,
    Means,
    Meter,
    Plan,
    Readings,
    SaveOutcome,
    StepTimes,
)
from tandem.telemetry.metrics import Sample
from tandem.telemetry.stragglers import PendingGather, RankTimes, Stragglers, StragglerWatch
from tandem.timeouts import PROGRESS_SECONDS

log = logging.getLogger("tandem.run")

# Create samples from a rank's measurements; pure.


def plan_samples(plan: Plan) -> list[Sample]:
    """Return samples of the planned length of the run."""
    return [
        metrics.STEPS_PLANNED.set(plan.steps_planned),
        metrics.EPOCHS_PLANNED.set(plan.steps_planned / plan.steps_per_epoch),
    ]


def position_samples(plan: Plan, step: int) -> list[Sample]:
    """Return samples of the position after `step` finished steps."""
    return [
        metrics.GLOBAL_STEP.set(step),
        metrics.EPOCH.set(step / plan.steps_per_epoch),
        metrics.PROGRESS_RATIO.set(step / plan.steps_planned),
    ]


def progress_samples(
    plan: Plan, costs: Costs, step: int, new_steps: int, samples_per_second: float
) -> list[Sample]:
    """Return samples of the position and of the last `new_steps` steps; 0 samples/s means unknown."""
    step_flops = round(plan.batch_size * costs.flops_per_sample)
    samples = [
        *position_samples(plan, step),
        metrics.STEPS.inc(new_steps),
        metrics.SAMPLES.inc(new_steps * plan.batch_size),
        metrics.MODEL_FLOPS.inc(new_steps * step_flops),
    ]
    # Alerts compare this time with the present, so a run that only reports must not move it.
    if new_steps:
        now = time.time()
        samples.append(metrics.LAST_STEP_TIMESTAMP_SECONDS.set(now))
        if samples_per_second > 0:
            seconds_left = (plan.steps_planned - step) * plan.batch_size / samples_per_second
            samples.append(metrics.ESTIMATED_COMPLETION_TIMESTAMP_SECONDS.set(now + seconds_left))
    return samples


def time_samples(steps: Sequence[StepTimes], sync_bytes: int) -> list[Sample]:
    """Return samples of step times, phases and waits, in one message because they belong together."""
    if not steps:
        return []
    waited = sum(each.wait for each in steps)
    by_step = [each.phases() for each in steps]
    phases = {name: sum(each[name] for each in by_step) for name in PHASES}
    return [
        # Round to nanoseconds, because more digits would only lengthen the message.
        metrics.STEP_DURATION_SECONDS.observe(*(round(each.total, 9) for each in steps)),
        *(metrics.STEP_PHASE_SECONDS.inc(seconds, phase=name) for name, seconds in phases.items()),
        metrics.GRADIENT_SYNC_SECONDS.inc(waited, overlap="exposed"),
        metrics.GRADIENT_SYNC_BYTES.inc(len(steps) * sync_bytes),
    ]


def line_samples(line: LogLine) -> list[Sample]:
    """Return the state of the optimization at a log line, without unknown values (loss scale, norm)."""
    readings = line.readings
    # The value of one sampled step, assumed for all.
    hidden_seconds = line.interval.steps * readings.hidden_sync_seconds
    known = [(metrics.GRAD_NORM, readings.grad_norm), (metrics.LOSS_SCALE, readings.loss_scale)]
    return [
        metrics.LOSS.set(line.loss, split="train"),
        metrics.LEARNING_RATE.set(line.rate, group="0"),
        metrics.GRAD_CLIPS.inc(readings.clips),
        metrics.GRADIENT_SYNC_SECONDS.inc(hidden_seconds, overlap="hidden"),
        *(metrics.TRAIN_SCORE.set(mean, score=name) for name, mean in line.scores.items()),
        *(gauge.set(value) for gauge, value in known if value is not None),
    ]


def score_samples(scores: Mapping[str, float]) -> list[Sample]:
    """Return samples of an evaluation's scores; its loss is also a loss."""
    loss = [metrics.LOSS.set(scores["loss"], split="eval")] if "loss" in scores else []
    return [metrics.EVAL_SCORE.set(value, score=name) for name, value in scores.items()] + loss


def gpu_memory_samples(now: DeviceMemory | None, before: DeviceMemory | None) -> list[Sample]:
    """Return the memory samples of one GPU, which each rank sends; empty for CPUs."""
    if now is None:
        return []
    # torch counts from the start of the process, so all of its first reading is new.
    earlier = before or DeviceMemory(0, 0, 0, 0, 0, 0)
    return [
        metrics.TORCH_MEMORY_ALLOCATED_BYTES.set(now.allocated, gpu=now.gpu),
        metrics.TORCH_MEMORY_RESERVED_BYTES.set(now.reserved, gpu=now.gpu),
        metrics.TORCH_MEMORY_PEAK_BYTES.set(now.peak, gpu=now.gpu),
        metrics.TORCH_ALLOC_RETRIES.inc(now.retries - earlier.retries),
        metrics.TORCH_OOMS.inc(now.ooms - earlier.ooms),
    ]


def save_samples(save: SaveOutcome) -> list[Sample]:
    """Return the samples of a finished or failed save."""
    if save.bytes is None:
        return [metrics.CHECKPOINT_SAVE_FAILURES.inc()]
    return [
        metrics.CHECKPOINT_SAVES.inc(),
        metrics.CHECKPOINT_WRITTEN_BYTES.inc(save.bytes),
        metrics.CHECKPOINT_BLOCKED_SECONDS.inc(save.held_seconds),
        metrics.CHECKPOINT_SAVE_DURATION_SECONDS.observe(save.seconds),
        metrics.CHECKPOINT_SIZE_BYTES.set(save.bytes),
        metrics.CHECKPOINT_LAST_SUCCESS_TIMESTAMP_SECONDS.set(time.time()),
        metrics.CHECKPOINT_LAST_SUCCESS_STEP.set(save.step),
    ]


MAX_TIMES = 1000
"""Maximum number of step times per message: with rows of 64 ranks, they fit a message of 64 KiB."""
TOKENS = "tokens"
"""Name of a sum that is also shown as a rate, if a task's loss or a loop's log has it."""


class Recorder:
    """Makes the reports of one rank in one launch.

    `send` sends its messages, those about steps every `pause` seconds; `clock` has its position.
    """

    def __init__(
        self,
        rank: int,
        batch_size: int,
        send: Send,
        clock: Clock,
        node: int = 0,
        pause: float = PROGRESS_SECONDS,
    ) -> None:
        self.rank = rank
        self.clock = clock
        self._send = send
        self._pause = pause
        self._plan = Plan(batch_size)
        self.meter = Meter()
        self._journal: Journal | None = None  # the displays of rank 0, set by `begin_run`
        self._progress: Progress | None = None
        self._tensorboard: EventWriter | None = None
        self._means = Means()
        self._tokens: float | None = None  # since the last line, in this process; None: not reported
        self._unsent_tokens = 0.0
        self.loss = math.nan
        self.rate = 0.0
        self.scores: dict[str, float] = {}
        self._own: dict[str, None] = {}
        """Names that a custom loop has logged, in order."""
        self._scores_step = -1
        self._unsent: list[StepTimes] = []
        self._stragglers = Stragglers(node)
        self._watch = StragglerWatch()
        self._memory: DeviceMemory | None = None
        self.rank_samples: list[Callable[[], list[Sample]]] = []
        """Each returns, once per log interval, samples that only this rank has."""
        self.known_costs = Costs()  # the last argument of `costs`, or from the loaded state
        self._snapshot_interval: float | None = None
        self._steps_sent = 0
        self._sent_at = 0.0

    def begin_run(
        self,
        step: int,
        steps_per_epoch: int,
        steps_planned: int,
        journal: Journal | None,
        progress: Progress | None,
        tensorboard: EventWriter | None,
    ) -> None:
        """Start the run with a known plan; rank 0 passes its outputs, the other ranks None."""
        self._plan = Plan(self._plan.batch_size, steps_per_epoch, steps_planned)
        self._journal = journal
        self._progress = progress
        self._tensorboard = tensorboard
        self.clock.resume(step)
        self._steps_sent = step
        if self.rank == 0:
            self._send(RunStarted(step, steps_per_epoch, steps_planned))
        self.samples(*plan_samples(self._plan), *position_samples(self._plan, step))

    def costs(self, costs: Costs) -> None:
        """Set the costs of a step; metrics of unknown costs stay absent."""
        self.known_costs = costs
        if costs.device_flops:
            self.samples(metrics.PEAK_FLOPS.set(costs.devices * costs.device_flops))
        if TOKENS in (costs.sums or ()):  # start at 0: rate() misses the first increment of a new series
            self.samples(metrics.TOKENS.inc(0))

    @property
    def step(self) -> int:
        return self.clock.step

    def end_step(self, rate: float) -> None:
        """Record a finished step; on GPUs, its times and consensus arrive later."""
        self._timed(self.clock.end_step())
        self.rate = rate
        self._judge_ranks(self._stragglers.arrived())
        if self._progress is not None:
            self._progress.advance(self.step)
        # Do not send a message per step, because steps of small models take only a few milliseconds.
        if time.monotonic() - self._sent_at >= self._pause or len(self._unsent) >= MAX_TIMES:
            self.samples(*self._steps_since_last())

    def _timed(self, times: Sequence[StepTimes]) -> None:
        """Record the times of steps, whenever they are known."""
        for each in times:
            self.meter.step(self._plan.batch_size, each)
        self._stragglers.record(times)
        if self.rank == 0:
            self._unsent += times

    def agreed(self, consensus: Consensus) -> None:
        """Record loss and sums of a step, whenever they arrive."""
        self._means.add(consensus)
        self._count_tokens(consensus.sums)

    def logged(self, sums: Mapping[str, tuple[float, float]]) -> None:
        """Record {name: (sum, count)} of all ranks, from a custom loop."""
        self._means.add_sums(sums)
        self._own |= {name: None for name in sums if name != TOKENS}
        self._count_tokens(sums)

    def _count_tokens(self, sums: Mapping[str, tuple[float, float]]) -> None:
        """Count tokens, whatever their count is.

        No checkpoint contains them, because it does not contain the time of the unfinished interval either.
        """
        if TOKENS in sums:
            self._tokens = (self._tokens or 0.0) + sums[TOKENS][0]
            self._unsent_tokens += sums[TOKENS][0]

    def state(self) -> dict[str, Any]:
        """Return the unfinished log interval and the costs, for a checkpoint.

        A resumed run then logs the same as an uninterrupted one, and does not count FLOPs again.
        """
        costs = self.known_costs
        return {
            **self._means.state(),
            "sum_names": None if costs.sums is None else list(costs.sums),
            "flops_per_sample": costs.flops_per_sample,
            "devices": costs.devices,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue a log interval that was unfinished when the checkpoint was saved."""
        self._means.load(state)
        names = state.get("sum_names")
        self.known_costs = Costs(
            state.get("flops_per_sample", 0.0),
            devices=int(state.get("devices", 0)),
            sums=None if names is None else tuple(names),
        )

    def log_interval(
        self, step: int, readings: Readings, exchange: Callable[[list[float]], PendingGather]
    ) -> None:
        """Report a log interval: one line, one row, one message.

        `exchange` starts to gather a row of every rank, to find the slowest (see `stragglers`).
        """
        # Do this first: a GPU may be some steps behind, and these steps belong to this interval.
        self._timed(self.clock.drain())
        self._judge_ranks(self._stragglers.gather(exchange))
        self.loss, means = self._means.close()
        line = LogLine(step, self.loss, self.rate, means, self.meter.interval(), readings)
        samples: list[Sample] = []
        if self.rank == 0:
            self._show(line)
            samples = line_samples(line) + self._pace_of_tokens(line) + self._steps_since_last()
        samples += gpu_memory_samples(readings.memory, self._memory)  # each rank reports its own GPU
        self._memory = readings.memory
        for measured in self.rank_samples:
            samples += measured()
        if samples:
            self._send(Samples(samples))

    def _pace_of_tokens(self, line: LogLine) -> list[Sample]:
        """Return the token rate (nothing before the first token), and restart the count for the next line."""
        # A rate of 0 would look measured in a run that never reports tokens.
        if self._tokens is None or line.interval.seconds <= 0:
            return []
        tokens = self._tokens
        self._tokens = 0.0
        return [metrics.TOKENS_PER_SECOND.set(tokens / line.interval.seconds)]

    def _show(self, line: LogLine) -> None:
        point = Point(line.step, time.time(), line.record())
        self._keep(point, "train", {**line.scores, **line.numbers()})
        if self._progress is not None:
            # Round up: the epoch that is in progress or has just ended, counted from 1.
            epoch = -(-line.step // self._plan.steps_per_epoch)
            speed = line.interval.samples_per_second
            more = {name: line.scores[name] for name in self._own if name in line.scores}
            self._progress.report(line.step, epoch=epoch, loss=line.loss, samples_per_second=speed, more=more)

    def _keep(self, point: Point, group: str, numbers: Mapping[str, float]) -> None:
        """Add a point to the page's curves and metrics.jsonl; `numbers` are for TensorBoard."""
        if self._journal is not None:
            epoch = point.step / self._plan.steps_per_epoch
            self._journal.metrics(point.step, epoch=epoch, **point.values)
        if self._tensorboard is not None:
            scalars = {f"{group}/{name}": value for name, value in numbers.items()}
            self._tensorboard.scalars(point.step, scalars)
        self._send(point)

    def _judge_ranks(self, ranks: list[RankTimes]) -> None:
        if self.rank != 0 or not ranks:
            return
        report = self._watch.report(ranks)
        self.samples(*report.samples)
        self._send(report.page)
        if report.new_straggler is not None:
            log.warning("%s", report.new_straggler)
            self.event("straggler", **report.new_straggler.facts())

    @property
    def last_loss(self) -> float:
        """The mean of the last log interval; before the first one, of all steps so far; NaN without steps."""
        return self._means.loss if math.isnan(self.loss) else self.loss

    def not_finite(self) -> None:
        """Show at once that the loss is not finite, because the run ends and no log line follows."""
        self.loss = math.nan
        # Otherwise `last_loss` would be the mean of the finite steps before.
        self._means.load({})
        self.samples(metrics.LOSS.set(math.nan, split="train"))

    def data_error(self, reason: str) -> None:
        """Count a sample that could not be read (each rank reports its own)."""
        self._send(Samples([metrics.DATA_ERRORS.inc(reason=reason)]))

    def evaluated(self, step: int, scores: Mapping[str, float]) -> None:
        """Report scores over the whole evaluation set, which are equal on all ranks."""
        self.scores = dict(scores)
        self._scores_step = step
        if self.rank != 0:
            return
        point = Point(step, time.time(), {"eval": self.scores})
        self._keep(point, "eval", self.scores)
        if self._progress is not None:
            text = ", ".join(f"{name} {value:.4f}" for name, value in self.scores.items())
            self._progress.note(f"evaluation after step {step:,}: {text}")
        self._send(Samples(score_samples(scores)))

    def recall(self, step: int, scores: Mapping[str, float]) -> None:
        """Restore the scores of an evaluation at `step` from before this launch or restart."""
        self.scores = dict(scores)
        self._scores_step = step

    def scores_at(self, step: int) -> dict[str, float]:
        """Return the scores of the evaluation at exactly this step; empty if the last one was at another."""
        return self.scores if self._scores_step == step else {}

    def saved(self, save: SaveOutcome) -> None:
        """Report the result of a save; called from the thread that wrote it."""
        if save.bytes is None:
            self.event("checkpoint_failed", step=save.step)
        else:
            self.event("checkpoint", step=save.step, seconds=round(save.seconds, 3), bytes=save.bytes)
        self.samples(*save_samples(save))

    def verified(self, step: int) -> None:
        """Report a checkpoint that was read back before older ones are removed; called by the same thread."""
        self.event("checkpoint_verified", step=step)

    def snapshots_every(self, seconds: float) -> None:
        """Report the interval of snapshots if it has changed; 0 for every step."""
        if seconds != self._snapshot_interval:
            self._snapshot_interval = seconds
            self.samples(metrics.SNAPSHOT_INTERVAL_SECONDS.set(seconds))

    def event(self, kind: str, **fields: object) -> None:
        """Write a line to events.jsonl, and show it on the page (rank 0)."""
        if self._journal is not None:
            self._journal.event(kind, **fields)
        if self.rank == 0:
            self._send(Event(kind, time.time(), fields))

    def samples(self, *samples: Sample) -> None:
        """Send samples for the metrics (rank 0)."""
        if self.rank == 0 and samples:
            self._send(Samples(list(samples)))

    def close(self) -> None:
        """Send the remaining samples and close the displays."""
        with reporting("close the displays"):
            self._judge_ranks(self._stragglers.arrived(wait=True))
            self.samples(*self._steps_since_last())
            if self._progress is not None:
                self._progress.close()
            if self._tensorboard is not None:
                self._tensorboard.close()

    def _steps_since_last(self) -> list[Sample]:
        """Return rank 0's position, and its steps and tokens since the last call; empty on other ranks."""
        self._sent_at = time.monotonic()
        if self.rank != 0:
            return []
        new_steps = self.step - self._steps_sent
        self._steps_sent = self.step
        times = self._unsent
        self._unsent = []
        pace = self.meter.samples_per_second
        self._send(StepsDone(self.step, self.loss if math.isfinite(self.loss) else None, round(pace, 1)))
        progress = progress_samples(self._plan, self.known_costs, self.step, new_steps, pace)
        tokens = self._unsent_tokens
        self._unsent_tokens = 0.0
        counted = [metrics.TOKENS.inc(tokens)] if tokens else []
        return progress + counted + time_samples(times, self.known_costs.sync_bytes)
