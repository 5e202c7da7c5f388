"""Find and load the state that a generation begins with.

The newest snapshot of any node counts, unless a checkpoint is newer. Rank 0 reads a checkpoint and broadcasts
it; shapes are compared before anything is loaded. See docs/architecture.md#a-checkpoint.
"""

import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, NamedTuple

from torch import Tensor

from tandem.checkpoint.decision import ResumeDecision, nothing_valid, warn_damaged, warn_none_left
from tandem.checkpoint.manifest import is_sharded
from tandem.checkpoint.node_memory import NodeMemory
from tandem.checkpoint.sharded import read_state
from tandem.checkpoint.snapshot import (
    NO_DESTINATIONS,
    OF,
    PER_RANK,
    Slot,
    forget_after,
    read_slot,
    skeleton_digest,
    skeleton_in,
    whole_slots,
)
from tandem.checkpoint.state import deserialize, serialize
from tandem.checkpoint.store import CheckpointStore
from tandem.config.slices import CheckpointConfig
from tandem.data.fingerprint import changed, data_facts, reordered
from tandem.data.sampler import GlobalOrder
from tandem.distributed.group import ProcessGroup
from tandem.distributed.neighbors import Piece, ShardMap, SlotsToKeep, deliver, listed_nodes, pieces_here
from tandem.distributed.position import Grant, Position
from tandem.distributed.whole_state import broadcast_state
from tandem.errors import ConfigError, CorruptCheckpointError, UnloadableError
from tandem.log import pluralize
from tandem.telemetry import metrics
from tandem.telemetry.recorder import Recorder
from tandem.training.shards import ShardedReading
from tandem.training.weights import InitialWeights, read_weights

log = logging.getLogger("tandem.run")

COMPLETE = -1
Redistribute = Callable[[list[dict[str, Any]], int, int], dict[str, Any]]
"""(states of the ranks that saved, this rank, number of ranks now) -> this rank's state by name."""


@dataclass(frozen=True)
class ResumePoint:
    """The start of this generation: the state to load (None: fresh) and its step, equal on all ranks.

    `source`: where the state came from, for people. `is_from_memory`: the state is a snapshot, maybe in no
    checkpoint. `slot`: the slot of this node that has it, or None. `generation`: this generation's number,
    which marks its snapshots. `weights`: the weights that a fresh run starts from. `scores`: of an evaluation
    at this step. `ended_of`: the number of planned steps of a run that the task ended here; else 0.
    `owes_evaluation`: a run failed in the evaluation of this step. `data`: the manifest's description of the
    dataset. `own`: this rank's own values by name, and `own_slot` the slot of their snapshot. `held`: slots
    to keep until the next node has newer copies.
    """

    step: int
    state: dict[str, Any] | None
    source: str = ""
    is_from_memory: bool = False
    slot: int | None = None
    generation: int = 0
    weights: InitialWeights | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    ended_of: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    own_slot: int | None = None
    held: SlotsToKeep = SlotsToKeep()
    owes_evaluation: bool = False


def begin(
    world: ProcessGroup,
    store: CheckpointStore,
    config: CheckpointConfig,
    grant: Grant,
    recorder: Recorder,
    download: bool,
    destinations: Mapping[str, Tensor] = NO_DESTINATIONS,
    own: Collection[str] = (),
    redistribute: Redistribute | None = None,
    shards: ShardedReading | None = None,
) -> ResumePoint:
    """Find the newest state, or the weights to start from, and load it on all ranks.

    `destinations`: the model's state_dict, into which tensors of a large state may be read directly. `own`:
    the names of the values that differ between ranks; `redistribute` converts these to another number of
    ranks. `shards`: each rank has its shard of the state.
    Raises ConfigError on all ranks if the checkpoint has other names or another number of ranks.
    """
    found = _Found(0)
    decision = grant.resume
    local_rank = world.position.local_rank
    slots = _own_slots(world.position, grant) if own else {}
    pieces = pieces_here(world, grant) if shards else []
    here = _NodeSnapshots.by(world.position.node_rank, grant.shared_memories, slots, pieces)
    there = [_NodeSnapshots(**told) for told in world.gather_json(here._asdict())]
    where = ShardMap([each.pieces for each in there], [each.node for each in there])
    if world.is_first and decision.kind == "complete":
        found = _Found(COMPLETE)
    elif world.is_first:
        store.open_for_writing()
        # The run restarts from another state, so snapshots on other nodes do not count.
        starts_over = config.resume == "never" or decision.moved_to is not None
        newest = where.newest() if shards else _best(there, has_own=bool(own))
        best = None if starts_over and grant.restart == 0 else newest
        found = _newest(store, best, decision, recorder, destinations, shards)
    if shards:
        shards.end()
    parts: list[dict[str, Any]] = found.state.pop(PER_RANK, []) if found.state else []
    named = sorted({name for part in parts for name in part})
    step, holder, info, count, named, generation = world.broadcast_json(
        [found.step, found.holder, found.shared_info(), len(parts), named, secrets.randbits(62)]
    )
    for region in grant.memories_of(local_rank):
        forget_after(region, max(step, 0))
    if step == 0 and config.init_from is not None:
        weights = _weights(world, config.init_from, config.init_strict, download)
        return ResumePoint(step, None, generation=generation, weights=weights)
    if step <= 0:
        return ResumePoint(step, None, generation=generation)
    began = time.monotonic()
    state = found.state
    found = _Found(step)  # drops the reference to the state on rank 0
    # After a snapshot, each rank's own values are in its memory; a checkpoint's are on rank 0.
    if holder is not None and shards:
        loaded = _shards_from_memory(world, grant, where, step)
    elif holder is not None:
        own_slot = slots[step].number if own else None
        loaded = _from_memory(world, grant, there, holder, step, destinations, own_slot)
    else:
        read = shards.state if shards else None
        state = read or (broadcast_state(world, state, destinations) if world.size > 1 else state)
        own_state = _own_state_of(world, parts, count, named, own, redistribute)
        loaded = ResumePoint(step, state, "checkpoint", own=own_state)
    took = metrics.CHECKPOINT_LAST_LOAD_DURATION_SECONDS.set(time.monotonic() - began)
    recorder.samples(metrics.CHECKPOINT_LOADS.inc(), took)
    return replace(
        loaded,
        generation=generation,
        scores=_numbers(info.get("eval", {})),
        ended_of=info.get("ended_of", 0),
        data=info.get("data", {}),
        owes_evaluation=bool(info.get("owes_evaluation", False)),
    )


class _NodeSnapshots(NamedTuple):
    """The contents of a node's memory, as its ranks tell the other ranks.

    `snapshots`: {step as text: [slot, generation, digest of the skeleton]}. `own`: {step: generation} of the
    rank's own values. `pieces`: of sharded state, in its own regions.
    """

    node: int
    snapshots: dict[str, list[Any]]
    own: dict[str, int]
    pieces: Sequence[Sequence[int]]

    @classmethod
    def by(
        cls, node: int, regions: Sequence[NodeMemory], own: Mapping[int, Slot], pieces: Sequence[Piece]
    ) -> "_NodeSnapshots":
        """Return what this rank has, in its node's shared `regions` and in its `own` region."""
        found = {
            str(step): [*slot, skeleton_digest(regions[0], slot.number)]
            for step, slot in whole_slots(regions).items()
        }
        return cls(node, found, {str(step): slot.generation for step, slot in own.items()}, pieces)

    def has(self, step: int) -> tuple[int, str] | None:
        """Return the identity of the snapshot of `step`, or None if it is not here."""
        _, *identity = self.snapshots.get(str(step), [None])
        return tuple(identity) or None


def _best(there: Sequence[_NodeSnapshots], has_own: bool) -> tuple[int, int] | None:
    """Return (step, lowest rank that has it) of the newest snapshot of any node, or None.

    With `has_own`, it counts only if every rank still has its own values of that step.
    """
    best = None
    for rank, held in enumerate(there):
        for step, (_, generation, _) in held.snapshots.items():
            is_whole = not has_own or all(each.own.get(step) == generation for each in there)
            if is_whole and (best is None or int(step) > best[0]):
                best = int(step), rank
    return best


def _shards_from_memory(world: ProcessGroup, grant: Grant, where: ShardMap, step: int) -> ResumePoint:
    """Return this rank's part of the snapshot of `step`, once all ranks have received missing parts."""
    state = where.state_at(step)
    held = where.held(world.rank, state)
    own_slot = deliver(world, grant, where, state, held.own)
    mine = read_slot(grant.own_memories(world.position.local_rank), step, own_slot).state
    nodes = where.sources(state)
    source = f"memory of {listed_nodes(nodes)}" if nodes else "memory of this node"
    if world.is_first:
        log.info("resuming from step %s (in-memory snapshot%s)", f"{step:,}", f", {source}" if nodes else "")
    if held.own is None:
        held = held._replace(own=own_slot)
    return ResumePoint(step, mine, source, is_from_memory=True, own_slot=own_slot, held=held)


def _from_memory(
    world: ProcessGroup,
    grant: Grant,
    there: Sequence[_NodeSnapshots],
    holder: int,
    step: int,
    destinations: Mapping[str, Tensor],
    own_slot: int | None,
) -> ResumePoint:
    """Return the snapshot of `step` from rank `holder`, and each rank's own values from its memory."""
    own = grant.own_memories(world.position.local_rank)
    mine = {} if own_slot is None else read_slot(own, step, own_slot).state
    state, slot = _shared_snapshot(world, grant.shared_memories, there, holder, step, destinations)
    node = None if slot is not None else there[holder].node
    if world.is_first:
        where = "" if node is None else f" of node {node}"
        log.info("resuming from step %s (in-memory snapshot%s)", f"{step:,}", where)
    source = "memory of this node" if node is None else f"memory of node {node}"
    own_state = mine.get(PER_RANK, {})
    return ResumePoint(step, state, source, is_from_memory=True, slot=slot, own=own_state, own_slot=own_slot)


def _shared_snapshot(
    world: ProcessGroup,
    regions: Sequence[NodeMemory],
    there: Sequence[_NodeSnapshots],
    holder: int,
    step: int,
    destinations: Mapping[str, Tensor],
) -> tuple[dict[str, Any], int | None]:
    """Return the state of the snapshot that rank `holder` has, and this node's slot with it, if any.

    Nothing is sent if all nodes have the snapshot.
    """
    chosen = there[holder].has(step)
    mine = there[world.rank]
    slot = int(mine.snapshots[str(step)][0]) if mine.has(step) == chosen else None
    if slot is not None and all(held.has(step) == chosen for held in there):
        return read_slot(regions, step, slot, destinations).state, slot
    state = read_slot(regions, step, slot).state if slot is not None and world.rank == holder else None
    return broadcast_state(world, state, destinations, holder), slot


def _own_slots(position: Position, grant: Grant) -> dict[int, Slot]:
    """Return {step: slot} of the snapshots of this rank's own values, if the number of ranks is the same."""
    regions = grant.own_memories(position.local_rank)
    me = [position.rank, position.world_size]
    return {
        s: slot for s, slot in whole_slots(regions).items() if skeleton_in(regions[0], slot.number)[OF] == me
    }


def _own_state_of(
    world: ProcessGroup,
    parts: Sequence[dict[str, Any]],
    count: int,
    named: Sequence[str],
    own: Collection[str],
    redistribute: Redistribute | None,
) -> dict[str, Any]:
    """Return this rank's values from the `parts` of a checkpoint, which rank 0 has. All ranks call this."""
    if sorted(own) != sorted(named):
        raise ConfigError(
            f"the checkpoint has different per_rank state: {_listed(named)} in it, {_listed(own)} here; "
            "keep the same names, or use another --run-dir or --resume never"
        )
    if not own:
        return {}
    if count != world.size and redistribute is None:
        raise ConfigError(
            f"the checkpoint's per_rank state ({_listed(named)}) is from {pluralize(count, 'rank')}, but "
            f"there are {world.size} now; start {pluralize(count, 'rank')}, or set "
            "run.keep(..., redistribute=...)"
        )
    states = list[dict[str, Any]]()
    for rank in range(count):
        # The parts are sent one by one, because a rank keeps only its own if their number is the same.
        raw = world.broadcast_bytes(serialize({PER_RANK: parts[rank]}) if world.is_first else None)
        if count != world.size or rank == world.rank:
            states.append(deserialize(raw)[PER_RANK])
    if count == world.size:
        return states[0]
    assert redistribute is not None
    made = redistribute(states, world.rank, world.size)
    if not isinstance(made, dict) or sorted(made) != sorted(named):
        got = _listed(made) if isinstance(made, dict) else type(made).__name__
        raise ConfigError(f"redistribute returned {got}; expected a dict with {_listed(named)}")
    return made


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(map(str, names))) or "none"


def _weights(world: ProcessGroup, source: PurePath, strict: bool, download: bool) -> InitialWeights:
    """Read the weights on rank 0 and broadcast them."""
    raw = world.on_first(lambda: read_weights(source, download))
    return InitialWeights(deserialize(world.broadcast_bytes(raw)), source, strict)


# Rank 0 passes these to the others, which therefore need no access to the run directory.
SHARED_INFO = ("eval", "ended_of", "owes_evaluation", "data")


class _Found(NamedTuple):
    """The state to resume from: that of a checkpoint, or the rank that has the snapshot."""

    step: int
    state: dict[str, Any] | None = None
    holder: int | None = None
    info: Mapping[str, Any] = {}

    def shared_info(self) -> dict[str, Any]:
        """Return the parts of the manifest that all ranks need."""
        shared = {name: self.info[name] for name in SHARED_INFO if name in self.info}
        if "data" not in shared and "train_samples" in self.info:  # from an older version
            shared["data"] = {"samples": self.info["train_samples"]}
        return shared


def _numbers(scores: Mapping[str, Any]) -> dict[str, float]:
    """Convert scores back to floats: JSON stores NaN and infinities as text."""
    return {name: float(value) for name, value in scores.items()}


def _newest(
    store: CheckpointStore,
    snapshot: tuple[int, int] | None,
    decision: ResumeDecision,
    recorder: Recorder,
    destinations: Mapping[str, Tensor] = NO_DESTINATIONS,
    shards: ShardedReading | None = None,
) -> _Found:
    """Return what to resume from, which is the first of these that exists:

    1. the newest snapshot of all nodes, given as (step, rank), unless a checkpoint here is newer
    2. the newest valid and loadable checkpoint here: one that this launch has saved, or the decision's
    3. the decision's checkpoints of another run, in its order
    4. step 0, unless the decision requires a checkpoint, or one that is here cannot be loaded
    """
    unloadable = list[str]()
    had_some = bool(store.steps())

    def cannot_load(step: int, problem: str) -> None:
        unloadable.append(f"step {step}: {problem}")
        log.warning(
            "checkpoint step %d is intact but cannot be loaded (%s): trying the one before it",
            step,
            problem,
        )
        _count_fallback(recorder, step, problem)

    def passed_over(step: int, problem: str) -> None:
        warn_damaged(step, problem)
        _count_fallback(recorder, step, problem)

    found = None
    # Do not read a checkpoint that cannot be newer than the snapshot.
    if snapshot is None or snapshot[0] < max(store.steps(), default=0):
        found = store.newest(
            lambda step: _read(store, step, destinations, shards), passed_over, on_unloadable=cannot_load
        )
    # The newest checkpoint may be damaged, so the one that was found can be older than the snapshot.
    if snapshot is not None and (found is None or found[0] <= snapshot[0]):
        return _Found(snapshot[0], holder=snapshot[1])
    if found is not None:
        return found[1]
    # Another run owns these, so damaged ones are skipped but not quarantined.
    for directory, step in decision.elsewhere:
        try:
            return _read(CheckpointStore(directory), step, destinations, shards)
        except CorruptCheckpointError as error:
            passed_over(step, str(error))
        except UnloadableError as error:
            cannot_load(step, str(error))
    # A fresh start would abandon a checkpoint that another version of torch or of the task can still load.
    if unloadable:
        raise ConfigError(
            f"no checkpoint in {store.directory} can be loaded ({unloadable[0]}); use the versions it was "
            "saved with, or use another --run-dir or --resume never"
        )
    if decision.needed:
        raise ConfigError(nothing_valid(store.directory))
    if had_some:
        warn_none_left(store.directory)
    return _Found(0)


def _read(
    store: CheckpointStore, step: int, destinations: Mapping[str, Tensor], shards: ShardedReading | None
) -> _Found:
    info: Mapping[str, Any]
    if shards and is_sharded(store.manifest(step)):
        state, info = shards.read(store, step)
    else:
        state, info = read_state(store, step, destinations)
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise UnloadableError("the checkpoint's state has no model")
    return _Found(step, state, info=info)


def _count_fallback(recorder: Recorder, step: int, problem: str) -> None:
    recorder.event("fallback", step=step, problem=problem)
    recorder.samples(metrics.CHECKPOINT_FALLBACKS.inc(), metrics.CHECKPOINT_LOAD_FAILURES.inc())


def check_data(
    world: ProcessGroup, resume_point: ResumePoint, dataset: Any, order: GlobalOrder, on_change: str
) -> Mapping[str, Any]:
    """Compare rank 0's training set and its order with the checkpoint's. All ranks call this.

    Returns its `data_facts`. Raises ConfigError on all ranks if it differs, unless `on_change` is "continue".
    Another order is no difference at the end of an epoch.
    """
    now = data_facts(dataset, order) if world.is_first else {}
    problem = advice = ""
    if resume_point.step > 0:
        problem = changed(resume_point.data, now)
        advice = "restore the data"
        if not problem and resume_point.step % order.steps_per_epoch:
            problem = reordered(resume_point.data, now)
            advice = (
                "finish the epoch with the version of tandem that saved it, resume at the end of an epoch "
                f"(--resume PATH@STEP, STEP a multiple of {order.steps_per_epoch:,})"
            )
    problem, advice = world.broadcast_json([problem, advice])
    if not problem:
        return now
    meaning = "so the checkpoint's position refers to different samples"
    if on_change != "continue":
        raise ConfigError(
            f"cannot resume at step {resume_point.step:,}: {problem}, {meaning}; {advice}, or use "
            "--on-data-change continue, another --run-dir, or --resume never"
        )
    if world.is_first:
        log.warning("resuming at step %s although %s, %s", f"{resume_point.step:,}", problem, meaning)
    return now
