"""Create samples from a rank's measurements; pure."""

import time
from collections.abc import Mapping, Sequence

from tandem.telemetry import metrics
from tandem.telemetry.families import Sample
from tandem.telemetry.meter import PHASES, Costs, DeviceMemory, LogLine, Plan, SaveOutcome, StepTimes


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
    phases = {name: sum(getattr(each, name) for each in steps) for name in PHASES}
    phases["backward"] += waited
    return [
        # In nanoseconds, because more digits would only lengthen the message.
        metrics.STEP_DURATION_SECONDS.observe(*(round(each.total, 9) for each in steps)),
        *(metrics.STEP_PHASE_SECONDS.inc(seconds, phase=name) for name, seconds in phases.items()),
        metrics.GRADIENT_SYNC_SECONDS.inc(waited, overlap="exposed"),
        metrics.GRADIENT_SYNC_BYTES.inc(len(steps) * sync_bytes),
    ]


def line_samples(line: LogLine) -> list[Sample]:
    """Return the state of the optimization at a log line, without unknown values (loss scale, norm)."""
    readings = line.readings
    # Of one sampled step, assumed for all.
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


def memory_samples(now: DeviceMemory | None, before: DeviceMemory | None) -> list[Sample]:
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
