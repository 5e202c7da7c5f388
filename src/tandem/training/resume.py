"""How a world begins: rank 0 reads a checkpoint, every rank gets it, shapes are compared before loading."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tandem.checkpoint.decision import ResumeDecision, nothing_valid, say_damaged
from tandem.checkpoint.snapshot import newest_snapshot
from tandem.checkpoint.state import deserialize, serialize
from tandem.checkpoint.store import CheckpointStore, checkpoints_of
from tandem.distributed.group import Position, ProcessGroup
from tandem.distributed.strategy import Strategy
from tandem.errors import ConfigError, CorruptCheckpointError
from tandem.telemetry import metrics
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
    slot: int | None = None


def begin(world: ProcessGroup, store: CheckpointStore, position: Position, recorder: Recorder) -> Beginning:
    """Rank 0 finds the newest state, see `_newest`; all get it by broadcast."""
    found, decision = _Found(0), position.resume
    if world.is_first and decision.kind == "complete":
        found = _Found(COMPLETE)
    elif world.is_first:
        store.open_for_writing()
        found = _newest(store, position, decision, recorder)
    step, slot = world.broadcast_json([found.step, found.slot])
    if step <= 0:
        return Beginning(step, None)
    began, state = time.monotonic(), found.state
    if world.size > 1 or state is None:
        payload = serialize(state) if state is not None and world.size > 1 else found.payload
        state = deserialize(world.broadcast_bytes(payload if world.is_first else None))
    took = metrics.CHECKPOINT_LAST_LOAD_DURATION_SECONDS.set(time.monotonic() - began)
    recorder.samples(metrics.CHECKPOINT_LOADS.inc(), took)
    return Beginning(step, state, slot)


class _Found(NamedTuple):
    """Where to go on: the bytes of a checkpoint, or the state of a snapshot and its slot."""

    step: int
    payload: bytes = b""
    state: dict[str, Any] | None = None
    slot: int | None = None


def _newest(
    store: CheckpointStore, position: Position, decision: ResumeDecision, recorder: Recorder
) -> _Found:
    """Where to go on; the first that is there:

    1. the snapshot in the node's memory, unless a checkpoint here is newer;
    2. the newest checkpoint here whose hashes hold: one that this launch has saved, or the decision's;
    3. the decision's checkpoints of another run, in its order;
    4. step 0, unless the decision needs a checkpoint.
    """
    snapshot = newest_snapshot(position.memories)
    if snapshot is not None and snapshot.step >= max(store.steps(), default=0):
        log.info("going on from step %d, kept in the node's memory", snapshot.step)
        return _Found(snapshot.step, state=snapshot.state, slot=snapshot.slot)
    found = store.newest_valid(lambda bad, problem: _passed_over(recorder, bad, problem))
    if found is not None:
        return _Found(found[0], found[1])
    for directory, step in decision.elsewhere:
        try:
            return _Found(step, CheckpointStore(directory).read(step)[0])
        except CorruptCheckpointError as error:
            _passed_over(recorder, step, str(error))
    if decision.needed:
        raise ConfigError(nothing_valid(store.directory))
    return _Found(0)


def _passed_over(recorder: Recorder, step: int, problem: str) -> None:
    say_damaged(step, problem)
    recorder.event("fallback", step=step, problem=problem)
    recorder.samples(metrics.CHECKPOINT_FALLBACKS.inc(), metrics.CHECKPOINT_LOAD_FAILURES.inc())


def load_state(
    state: Mapping[str, Any],
    strategy: Strategy,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
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
    strategy.load_model(model, theirs)
    groups = [dict(group) for group in optimizer.param_groups]
    strategy.load_optimizer(optimizer, state["optimizer"])
    if schedule.is_by_settings:
        for group, ours in zip(optimizer.param_groups, groups, strict=True):
            group.update({name: value for name, value in ours.items() if name != "params"})
    schedule.load(state["schedule"])


def _newest_of(run: Path) -> bytes | None:
    store = CheckpointStore(checkpoints_of(run))
    found = store.newest(store.read, say_damaged, quarantine=False)
    return None if found is None else found[1][0]


def load_weights(world: ProcessGroup, strategy: Strategy, path: Path, model: nn.Module) -> None:
    """`--init-from`: load the keys whose names and shapes match, and say which did not."""
    raw: bytes | None = None
    if world.is_first:
        if path.is_file():
            raw = path.read_bytes()
        elif (newest := _newest_of(path)) is not None:
            raw = newest
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
    strategy.load_model(model, fitting, strict=False)
    left = sorted(set(mine) - set(fitting))
    log.info(
        "loaded %d of %d tensors from %s%s",
        len(fitting),
        len(mine),
        path,
        f"; left at their start: {', '.join(left)}" if left else "",
    )
