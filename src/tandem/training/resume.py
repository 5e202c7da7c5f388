"""How a world begins: rank 0 reads a checkpoint, every rank gets it, shapes are compared before loading."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tandem.checkpoint.snapshot import newest_snapshot
from tandem.checkpoint.state import ResumeDecision, deserialize, serialize
from tandem.checkpoint.store import CheckpointStore
from tandem.distributed.group import Position, ProcessGroup
from tandem.errors import ConfigError
from tandem.telemetry.recorder import Recorder
from tandem.training.optim import Schedule

log = logging.getLogger("tandem.run")

COMPLETE = -1


@dataclass(frozen=True)
class Beginning:
    """Where this world begins: the state to load (None: fresh) and its step, equal on all ranks.

    `slot`: of the snapshot that the state came from; None when it came from elsewhere.
    """

    step: int
    state: dict[str, Any] | None
    changes: list[str]
    slot: int | None = None


def begin(
    world: ProcessGroup,
    store: CheckpointStore,
    position: Position,
    decision: ResumeDecision | None,
    recorder: Recorder,
) -> Beginning:
    """Rank 0 finds the newest state, see `_newest`; all get it by broadcast."""
    step, payload, state, slot = 0, b"", None, None
    if world.is_first and decision is not None and decision.kind == "complete":
        log.info("the run is complete at step %d; raise --epochs or --steps to go on", decision.step)
        step = COMPLETE
    elif world.is_first:
        step, state, payload, slot = _newest(world, store, position, decision, recorder)
    step, slot = world.broadcast_json([step, slot])
    if step <= 0:
        return Beginning(step, None, [])
    began = time.monotonic()
    if world.size > 1 or state is None:
        payload = serialize(state) if state is not None else payload
        state = deserialize(world.broadcast_bytes(payload if world.is_first else None))
    recorder.message(
        {
            "inc": [["tandem_checkpoint_loads", {}, 1]],
            "set": [["tandem_checkpoint_last_load_duration_seconds", {}, time.monotonic() - began]],
        }
    )
    return Beginning(step, state, decision.changes if decision is not None else [], slot)


def _newest(
    world: ProcessGroup,
    store: CheckpointStore,
    position: Position,
    decision: ResumeDecision | None,
    recorder: Recorder,
) -> tuple[int, dict[str, Any] | None, bytes, int | None]:
    """(step, state, or its bytes, slot of a snapshot) of where to go on: the snapshot in the node's memory
    unless a checkpoint is newer; then the newest valid checkpoint; then the one the agent chose; step 0."""
    snapshot = newest_snapshot(position.memories)
    if snapshot is not None and snapshot.step >= max(store.steps(), default=0):
        log.info("going on from step %d, kept in the node's memory", snapshot.step)
        return snapshot.step, snapshot.state, b"", snapshot.slot
    found = store.newest_valid(lambda bad, problem: _quarantined(recorder, bad, problem))
    if found is not None:
        return found[0], None, found[1], None
    if decision is not None and decision.directory is not None:
        return decision.step, None, CheckpointStore(decision.directory).read(decision.step)[0], None
    if position.start_from is not None:
        directory, step = position.start_from
        return step, None, CheckpointStore(Path(directory)).read(step)[0], None
    return 0, None, b"", None


def _quarantined(recorder: Recorder, step: int, problem: str) -> None:
    log.warning("checkpoint step %d is damaged (%s): set aside, using the one before", step, problem)
    recorder.event("fallback", step=step, problem=problem)
    recorder.message(
        {"inc": [["tandem_checkpoint_fallbacks", {}, 1], ["tandem_checkpoint_load_failures", {}, 1]]}
    )


def load_state(
    state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule
) -> None:
    """Load a checkpoint's state; ConfigError when it is of another model (the checkpoint is left alone).

    The optimizer's numbers (weight decay, momentum) are those of the settings, which may have changed, unless
    the task made the optimizer or moves its learning rate by a scheduler of its own.
    """
    mine, theirs = model.state_dict(), state["model"]
    for name in sorted({*mine, *theirs}):
        here = tuple(mine[name].shape) if name in mine else "missing"
        there = tuple(theirs[name].shape) if name in theirs else "missing"
        if here != there:
            raise ConfigError(
                f"the checkpoint is of another model: {name} is {there} in it and {here} in this model; "
                "give another --run-dir or --resume never"
            )
    model.load_state_dict(theirs)
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(state["optimizer"])
    if schedule.is_by_settings:
        for group, ours in zip(optimizer.param_groups, groups, strict=True):
            group.update({name: value for name, value in ours.items() if name != "params"})
    schedule.load(state["schedule"])


def load_weights(world: ProcessGroup, path: Path, model: nn.Module) -> None:
    """`--init-from`: load the keys whose names and shapes match, and say which did not."""
    raw: bytes | None = None
    if world.is_first:
        found = CheckpointStore(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
        if path.is_file():
            raw = path.read_bytes()
        elif (newest := found.newest_step(lambda _step, _problem: None, quarantine=False)) is not None:
            raw = found.read(newest)[0]
        else:
            raise ConfigError(f"--init-from {path}: no checkpoint or weights file there")
    state = deserialize(world.broadcast_bytes(raw))
    weights = state.get("model", state)
    mine = model.state_dict()
    fitting = {
        name: value
        for name, value in weights.items()
        if name in mine and isinstance(value, torch.Tensor) and value.shape == mine[name].shape
    }
    model.load_state_dict(fitting, strict=False)
    left = sorted(set(mine) - set(fitting))
    log.info(
        "loaded %d of %d tensors from %s%s",
        len(fitting),
        len(mine),
        path,
        f"; left at their start: {', '.join(left)}" if left else "",
    )
