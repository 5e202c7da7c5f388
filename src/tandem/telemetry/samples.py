"""Samples out of what a rank has measured; pure."""

import time
from collections.abc import Mapping, Sequence

from tandem.telemetry import metrics
from tandem.telemetry.families import Sample
from tandem.telemetry.meter import PHASES, DeviceMemory, Interval, Readings, SaveOutcome, StepTimes


def position_samples(step: int, steps_per_epoch: int, steps_planned: int) -> list[Sample]:
    """Where the run stands after `step` finished steps."""
    return [
        metrics.GLOBAL_STEP.set(step),
        metrics.EPOCH.set(step / steps_per_epoch),
        metrics.PROGRESS_RATIO.set(step / steps_planned),
    ]


def progress_samples(
    new_steps: int, batch_size: int, step_flops: int, seconds_left: float | None
) -> list[Sample]:
    """What has been done since the last ones; `seconds_left` at the present pace, where that is known."""
    samples = [
        metrics.STEPS.inc(new_steps),
        metrics.SAMPLES.inc(new_steps * batch_size),
        metrics.MODEL_FLOPS.inc(new_steps * step_flops),
    ]
    if new_steps:
        now = time.time()
        samples.append(metrics.LAST_STEP_TIMESTAMP_SECONDS.set(now))
        if seconds_left is not None:
            samples.append(metrics.ESTIMATED_COMPLETION_TIMESTAMP_SECONDS.set(now + seconds_left))
    return samples


def time_samples(steps: Sequence[StepTimes], sync_bytes: int) -> list[Sample]:
    """Step times, phases and waits; they belong together, so they travel together."""
    waited = sum(each.wait for each in steps)
    phases = {name: sum(getattr(each, name) for each in steps) for name in PHASES}
    phases["backward"] += waited
    return [
        metrics.STEP_DURATION_SECONDS.observe(*(round(each.total, 9) for each in steps)),
        *(metrics.STEP_PHASE_SECONDS.inc(seconds, phase=name) for name, seconds in phases.items()),
        metrics.GRADIENT_SYNC_SECONDS.inc(waited, overlap="exposed"),
        metrics.GRADIENT_SYNC_BYTES.inc(len(steps) * sync_bytes),
    ]


def interval_samples(
    interval: Interval, readings: Readings, loss: float, rate: float, scores: Mapping[str, float]
) -> list[Sample]:
    """The state of the optimisation at a log line; what there is not (a loss scale, a norm) stays away.

    `scores` are the means of what the task's loss gives besides, over the steps of the interval.
    """
    hidden_seconds = interval.steps * readings.hidden_sync_seconds  # of one sampled step, taken for all
    known = [(metrics.GRAD_NORM, readings.grad_norm), (metrics.LOSS_SCALE, readings.loss_scale)]
    return [
        metrics.LOSS.set(loss, split="train"),
        metrics.LEARNING_RATE.set(rate, group="0"),
        metrics.GRAD_CLIPS.inc(readings.clips),
        metrics.GRADIENT_SYNC_SECONDS.inc(hidden_seconds, overlap="hidden"),
        *(metrics.TRAIN_SCORE.set(mean, score=name) for name, mean in scores.items()),
        *(gauge.set(value) for gauge, value in known if value is not None),
    ]


def memory_samples(now: DeviceMemory, before: DeviceMemory | None) -> list[Sample]:
    """What one GPU holds; every rank sends its own."""
    earlier = before or DeviceMemory(0, 0, 0, 0, 0, 0)
    return [
        metrics.TORCH_MEMORY_ALLOCATED_BYTES.set(now.allocated, gpu=now.gpu),
        metrics.TORCH_MEMORY_RESERVED_BYTES.set(now.reserved, gpu=now.gpu),
        metrics.TORCH_MEMORY_PEAK_BYTES.set(now.peak, gpu=now.gpu),
        metrics.TORCH_ALLOC_RETRIES.inc(now.retries - earlier.retries),
        metrics.TORCH_OOMS.inc(now.ooms - earlier.ooms),
    ]


def save_samples(save: SaveOutcome) -> list[Sample]:
    """A save that ended now, well or not."""
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
