"""How a generation begins: rank 0 reads a checkpoint, all get it, shapes are compared before loading."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem.checkpoint.decision import ResumeDecision, nothing_valid, say_damaged
from tandem.checkpoint.large import file_of, through
from tandem.checkpoint.snapshot import newest_snapshot
from tandem.checkpoint.state import deserialize, deserialize_file
from tandem.checkpoint.store import CheckpointStore
from tandem.config.slices import CheckpointConfig
from tandem.distributed.group import Position, ProcessGroup
from tandem.distributed.strategy import Strategy
from tandem.distributed.whole_state import broadcast_state
from tandem.errors import ConfigError, CorruptCheckpointError
from tandem.telemetry import metrics
from tandem.telemetry.recorder import Recorder
from tandem.training.optim import Schedule
from tandem.training.weights import Initial, read_weights

log = logging.getLogger("tandem.run")

COMPLETE = -1
NONE: Mapping[str, Tensor] = {}
KERNELS = ("fused", "foreach", "capturable")
"""What an optimizer's group says of how it computes; not what."""


@dataclass(frozen=True)
class Beginning:
    """Where this generation begins: the state to load (None: fresh) and its step, equal on all ranks.

    `slot`: of the snapshot that the state came from; None when it came from elsewhere. `weights`: those that
    a fresh run starts from. `scores`: of an evaluation at this step. `ended_of`: the task ended a run of so
    many steps here; 0 where it has not.
    """

    step: int
    state: dict[str, Any] | None
    slot: int | None = None
    weights: Initial | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    ended_of: int = 0


def begin(
    world: ProcessGroup,
    store: CheckpointStore,
    config: CheckpointConfig,
    position: Position,
    recorder: Recorder,
    download: bool,
    homes: Mapping[str, Tensor] = NONE,
) -> Beginning:
    """Rank 0 finds the newest state, see `_newest`, or the weights to start from; all get it by broadcast.

    `homes`: the model's state_dict, which a large state's tensors may be read into at once.
    """
    found, decision = _Found(0), position.resume
    if world.is_first and decision.kind == "complete":
        found = _Found(COMPLETE)
    elif world.is_first:
        store.open_for_writing()
        found = _newest(store, position, decision, recorder, homes)
    step, slot, info = world.broadcast_json([found.step, found.slot, found.said()])
    if step == 0 and config.init_from is not None:
        return Beginning(step, None, weights=_weights(world, config.init_from, config.init_min, download))
    if step <= 0:
        return Beginning(step, None)
    began, state = time.monotonic(), found.state
    if world.is_first and state is None:
        state = deserialize(found.payload)
    found = _Found(step)  # whose bytes may go
    state = broadcast_state(world, state, homes) if world.size > 1 else state
    took = metrics.CHECKPOINT_LAST_LOAD_DURATION_SECONDS.set(time.monotonic() - began)
    recorder.samples(metrics.CHECKPOINT_LOADS.inc(), took)
    return Beginning(
        step, state, slot, scores=_numbers(info.get("eval", {})), ended_of=info.get("ended_of", 0)
    )


def _weights(world: ProcessGroup, place: PurePath, least: float, download: bool) -> Initial:
    """Rank 0 reads them for all; what it finds wrong all ranks raise."""
    raw, problem = None, ""
    if world.is_first:
        try:
            raw = read_weights(place, download)
        except ConfigError as error:
            problem = str(error)
    problem = str(world.broadcast_json(problem))
    if problem:
        raise ConfigError(problem)
    return Initial(deserialize(world.broadcast_bytes(raw)), place, least)


class _Found(NamedTuple):
    """Where to go on: the bytes of a checkpoint, or the state of a snapshot and its slot."""

    step: int
    payload: bytes = b""
    state: dict[str, Any] | None = None
    slot: int | None = None
    info: Mapping[str, Any] = {}

    def said(self) -> dict[str, Any]:
        """What all ranks need of its manifest."""
        return {name: self.info[name] for name in ("eval", "ended_of") if name in self.info}


def _numbers(scores: Mapping[str, Any]) -> dict[str, float]:
    """As they were: JSON has NaN and infinities as text."""
    return {name: float(value) for name, value in scores.items()}


def _newest(
    store: CheckpointStore,
    position: Position,
    decision: ResumeDecision,
    recorder: Recorder,
    homes: Mapping[str, Tensor] = NONE,
) -> _Found:
    """Where to go on; the first that is there:

    1. the snapshot in the node's memory, unless a checkpoint here is newer;
    2. the newest checkpoint here whose hashes hold: one that this launch has saved, or the decision's;
    3. the decision's checkpoints of another run, in its order;
    4. step 0, unless the decision needs a checkpoint.
    """
    snapshot = newest_snapshot(position.memories)
    if snapshot is not None and snapshot.step >= max(store.steps(), default=0):
        log.info("going on from step %s, kept in the node's memory", f"{snapshot.step:,}")
        return _Found(snapshot.step, state=snapshot.state, slot=snapshot.slot)
    found = store.newest(
        lambda step: _read(store, step, homes), lambda bad, problem: _passed_over(recorder, bad, problem)
    )
    if found is not None:
        return found[1]
    for directory, step in decision.elsewhere:
        try:
            return _read(CheckpointStore(directory), step, homes)
        except CorruptCheckpointError as error:
            _passed_over(recorder, step, str(error))
    if decision.needed:
        raise ConfigError(nothing_valid(store.directory))
    return _Found(0)


def _read(store: CheckpointStore, step: int, homes: Mapping[str, Tensor]) -> _Found:
    if path := file_of(store, step):
        state, info = through(store, step, path, lambda file: deserialize_file(file, homes))
        return _Found(step, state=state, info=info)
    payload, info = store.read(step)
    return _Found(step, payload, info=info)


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
    theirs = state["model"]
    check_shapes(model.state_dict(), theirs)
    strategy.load_model(model, theirs)
    groups = [dict(group) for group in optimizer.param_groups]
    strategy.load_optimizer(optimizer, state["optimizer"])
    if schedule.is_by_settings:
        for group, ours in zip(optimizer.param_groups, groups, strict=True):
            group.update({name: value for name, value in ours.items() if name != "params"})
    on_their_devices(optimizer, groups)
    schedule.load(state["schedule"], int(state["step"]))


def on_their_devices(optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]]) -> None:
    """Kernels are those of this device, whichever the checkpoint comes from, and steps lie where they look.

    `before`: the groups as the optimizer was made. Adam counts steps on the host, but fused or captured on
    its device, and `load_state_dict` goes by how it was saved.
    """
    for group, ours in zip(optimizer.param_groups, before, strict=True):
        group.update({name: ours[name] for name in KERNELS if name in ours})
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = _beside(parameter, name, value, bool(on_device))


def _beside(parameter: torch.Tensor, name: str, value: torch.Tensor, steps_on_device: bool) -> torch.Tensor:
    """A tensor of an optimizer's state where its kernels look for it, laid out as the parameter is."""
    if name == "step":
        return value.to(parameter.device, torch.float32) if steps_on_device else value
    if value.shape == parameter.shape and value.stride() != parameter.stride():
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return value


def check_shapes(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise ConfigError naming the first tensor in which a model's state and a checkpoint's differ."""
    for name in sorted({*mine, *theirs}):
        here = tuple(getattr(mine[name], "shape", ())) if name in mine else "missing"
        there = tuple(getattr(theirs[name], "shape", ())) if name in theirs else "missing"
        if here != there:
            raise ConfigError(
                f"the checkpoint is of another model: {name} is {there} in it and {here} in this model; "
                "give another --run-dir or --resume never"
            )


def check_model(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """As `check_shapes`, where a task is asked for the model of a checkpoint."""
    try:
        check_shapes(model.state_dict(), weights)
    except ConfigError as error:
        raise ConfigError(
            f"{str(error).partition(';')[0]}; give the task and fields it was trained with"
        ) from error
