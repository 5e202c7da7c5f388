"""A rank's numbers as messages for `Metrics.apply`, by the names that families.py declares; pure."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from tandem.telemetry.meter import PHASES, DeviceMemory, StepTimes

Message = dict[str, object]

TIMES_PER_MESSAGE = 1000
"""A message holds 64 KiB."""


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


class Readings(Protocol):
    """The part of `step.Readings` that is recorded."""

    @property
    def grad_norm(self) -> float | None: ...
    @property
    def loss_scale(self) -> float | None: ...
    @property
    def clips(self) -> int: ...
    @property
    def hidden_sync_seconds(self) -> float: ...
    @property
    def memory(self) -> DeviceMemory | None: ...


def memory(now: DeviceMemory, before: DeviceMemory | None) -> Message:
    """What one GPU holds; every rank sends its own, and node 0's agent shows those of its node."""
    label, earlier = {"gpu": now.gpu}, before or DeviceMemory(0, 0, 0, 0, 0, 0)
    return {
        "set": [
            ["tandem_torch_memory_allocated_bytes", label, now.allocated],
            ["tandem_torch_memory_reserved_bytes", label, now.reserved],
            ["tandem_torch_memory_peak_bytes", label, now.peak],
        ],
        "inc": [
            ["tandem_torch_alloc_retries", {}, now.retries - earlier.retries],
            ["tandem_torch_ooms", {}, now.ooms - earlier.ooms],
        ],
    }


def optimisation(loss: float, rate: float, readings: Readings) -> Message:
    """The state of the optimisation at a log line; what there is not (a loss scale, a norm) stays away."""
    gauges = [("grad_norm", readings.grad_norm), ("loss_scale", readings.loss_scale)]
    return {
        "set": [
            ["tandem_loss", {"split": "train"}, loss],
            ["tandem_learning_rate", {"group": "0"}, rate],
            *([f"tandem_{name}", {}, value] for name, value in gauges if value is not None),
        ],
        "inc": [["tandem_grad_clips", {}, readings.clips]],
    }


def times(steps: Sequence[StepTimes], sync_bytes: int) -> Iterator[Message]:
    """Step times, phases and waits; they belong together, so they travel together."""
    durations, waited = [each.total for each in steps], sum(each.wait for each in steps)
    phases = {name: sum(getattr(each, name) for each in steps) for name in PHASES}
    phases["backward"] += waited
    for start in range(0, len(durations), TIMES_PER_MESSAGE):
        chunk = [round(seconds, 9) for seconds in durations[start : start + TIMES_PER_MESSAGE]]
        yield {"observe": [["tandem_step_duration_seconds", {}, chunk]]}
    rows: list[object] = [
        ["tandem_step_phase_seconds", {"phase": name}, seconds] for name, seconds in phases.items()
    ]
    rows.append(["tandem_gradient_sync_seconds", {"overlap": "exposed"}, waited])
    rows.append(["tandem_gradient_sync_bytes", {}, len(durations) * sync_bytes])
    yield {"inc": rows}


def saved(save: EndedSave, now: float) -> Message:
    """A save that ended at `now` (Unix seconds), well or not."""
    if save.bytes is None:
        return {"inc": [["tandem_checkpoint_save_failures", {}, 1]]}
    return {
        "inc": [
            ["tandem_checkpoint_saves", {}, 1],
            ["tandem_checkpoint_written_bytes", {}, save.bytes],
            ["tandem_checkpoint_blocked_seconds", {}, save.held_seconds],
        ],
        "observe": [["tandem_checkpoint_save_duration_seconds", {}, save.seconds]],
        "set": [
            ["tandem_checkpoint_size_bytes", {}, save.bytes],
            ["tandem_checkpoint_last_success_timestamp_seconds", {}, now],
            ["tandem_checkpoint_last_success_step", {}, save.step],
        ],
    }
