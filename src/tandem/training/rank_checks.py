"""Check that all ranks train the same weights, and that each computes correctly.

DDP makes ranks equal at the start, gives all of them the same gradients, and never checks again. If a task
changes weights on one rank, or a GPU or memory fails silently, every later step mixes different models. So
checksums of the weights are compared. A comparison cannot find a wrong gradient, because the mean over ranks
puts it into all replicas alike. For that, another rank repeats a micro-batch before its step counts: seeds
depend only on positions, so it gets the same bits. See docs/architecture.md#the-replay-check.
"""

import io
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tandem.config.slices import ComputeConfig
from tandem.data.loader import mapped, tensors_of
from tandem.data.seeds import seed_micro_step
from tandem.distributed.batchnorm import SynchronizedBatchNorm
from tandem.distributed.group import ProcessGroup, has_buffers_beside_batchnorm
from tandem.distributed.strategy import Strategy
from tandem.errors import ConfigError, ReplayMismatchError, ReplicaMismatchError
from tandem.schedule import Cadence
from tandem.telemetry import metrics
from tandem.telemetry.recorder import Recorder
from tandem.training.buffers import KeptBuffers, buffers_kept

# Compare the ranks' weights, with checksums on the device.

# A table needs weights for its columns and rows only, not for each word of a large tensor.
BLOCK = 1024
# This is 2**64 divided by the golden ratio, as in SplitMix64 (Steele et al., 2014), as a signed number.
_ODD = 0x9E3779B97F4A7C15 - 2**64  # multiplication by an odd number loses no bit


def check_replicas(
    world: ProcessGroup, strategy: Strategy, model: nn.Module, recorder: Recorder, step: int
) -> None:
    """Compare all ranks' weights after `step` finished steps; does nothing if the parameters are sharded.

    Raises ReplicaMismatchError on all ranks, naming each rank that differs and its first different tensor.
    The weights that most ranks have count as right; in a tie, those of rank 0 if it is among them.
    """
    if world.size == 1 or strategy.shards_parameters:
        return
    named = comparable(model)
    # With --devices-per-rank, the tensors of one rank are on several GPUs.
    sums = torch.stack([checksum(tensor).to(world.device) for tensor in named.values()])
    # Ranks exchange one number each; the sums of all tensors travel only after a mismatch.
    digests = world.gather(int(checksum(sums)))
    if len(set(digests)) == 1:
        return
    counts = Counter(digests)
    right = max(digests, key=lambda digest: (counts[digest], digest == digests[0]))
    position = world.position
    own_sums = {"node": f"node {position.node_rank} ({position.node_name})", "sums": sums.tolist()}
    ranks: list[Any] = world.gather_json(own_sums)
    expected = ranks[digests.index(right)]["sums"]
    names = list(named)
    found = []
    for rank, digest in enumerate(digests):
        if digest != right:
            pairs = zip(names, ranks[rank]["sums"], expected, strict=True)
            tensor = next(name for name, here, there in pairs if here != there)
            found.append({"rank": rank, "node": ranks[rank]["node"], "tensor": tensor})
    recorder.event("replica_mismatch", step=step, ranks=found)
    recorder.samples(metrics.REPLICA_MISMATCHES.inc(len(found)))
    message = "; ".join("rank {rank} on {node} differs, first in {tensor}".format(**one) for one in found)
    raise ReplicaMismatchError(
        f"the ranks no longer train the same weights after step {step}: {message}; unless the task "
        "changes weights itself, suspect that machine; resume from an earlier checkpoint with "
        "--resume PATH@STEP"
    )


def comparable(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that must be equal on all ranks: all parameters, and SyncBatchNorm's statistics.

    Other buffers are left out: BatchNorm's differ by design, and DDP broadcasts rank 0's before each forward
    pass.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm | SynchronizedBatchNorm):
            tensors.update(module.named_buffers(prefix, recurse=False))
    return tensors


def checksum(tensor: Tensor) -> Tensor:
    """Return a 64-bit checksum of a tensor's bytes and their positions, as an int64 scalar on its device.

    One pass, no copy. It detects any change of one 8-byte word, and words that changed places. It takes 18 ms
    for 100 MB on one core, a third of SHA-256, and does not protect against forgery.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    raw = flat.view(torch.uint8)
    whole = len(raw) // 8 * 8
    if raw.storage_offset() % 8:  # a view into another tensor: int64 needs aligned words
        raw = raw.clone()
    total = _weighted(raw[:whole].view(torch.int64))
    return total + (_weighted(raw[whole:].long()) * _ODD if whole < len(raw) else 0)


def _weighted(words: Tensor) -> Tensor:
    """Return the sum of int64 words, weighted by column and row of a table with `BLOCK` columns; wraps."""
    rows = len(words) // BLOCK
    table = words[: rows * BLOCK].view(rows, BLOCK)
    total = _dot(words[rows * BLOCK :], 1)
    if rows == 0:
        return total
    return total + _dot(table.sum(dim=0), 3) + 2 * _dot(table.sum(dim=1), 5)  # odd + 2 * odd is odd


def _dot(words: Tensor, salt: int) -> Tensor:
    weights = (torch.arange(len(words), device=words.device) * 2 + salt) * _ODD
    # The shift mixes high bits into the low ones, and `| 1` keeps each weight odd.
    return (words * (weights ^ (weights >> 29) | 1)).sum()


# Repeat a micro-batch on another rank.

COST = 0.01
"""Largest share of the time for `--replay-check auto`."""
SHORTEST_SECONDS = 30.0
"""Shortest interval for `--replay-check auto`."""

Sums = list[int]
"""One checksum per parameter; 0 if it has no gradient."""


@dataclass(frozen=True)
class RepeatReport:
    """A rank's checksums in a check: of its own gradients, its state, and the work that it repeated.

    `replays`: (the rank whose micro-batch was repeated, checksums), in the order of the rounds.
    """

    own: Sums
    state: Sums
    replays: list[tuple[int, Sums]] = field(default_factory=list)


@dataclass(frozen=True)
class RepeatVerdict:
    """The ranks that computed wrongly, each with the first tensor that shows it.

    `is_certain` is False if no two ranks agree, or if there are only two ranks and they differ.
    """

    wrong: Mapping[int, str]
    is_certain: bool = True


class ReplayCheck:
    """Checks the steps before which `check_next_step` was called."""

    def __init__(
        self,
        world: ProcessGroup,
        module: nn.Module,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        seed: int,
        recorder: Recorder,
    ) -> None:
        self.is_due = False
        self.on_cost: Callable[[float], None] = lambda seconds: None
        """Receives the seconds that each check took."""
        self._world = world
        self._module = module
        self._model = model
        self._optimizer = optimizer
        self._seed = seed
        self._recorder = recorder
        self._buffers = KeptBuffers(model.modules)
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._gradients: dict[int, Tensor] = {}
        self._number = 0
        self._last_clean: int | None = None

    def check_next_step(self) -> None:
        """Make the next step a checked one; all ranks call this after the same step."""
        self.is_due = True

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record this rank's gradients of a micro-batch, before DDP reduces them."""
        if has_buffers_beside_batchnorm(self._model):
            # DDP gives all ranks rank 0's buffers at the forward pass. An earlier copy would have other
            # values.
            self._world.broadcast_buffers(self._model)
        self._buffers.keep()
        self._gradients.clear()
        # torch calls these hooks as soon as a gradient has been added, and DDP's after them.
        hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._record, index)
            )
            for index, parameter in enumerate(self._trained())
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _record(self, index: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._gradients[index] = _sum_of(parameter.grad)

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self._model.parameters() if p.requires_grad]

    def compare(self, step: int, batch: Any, scale: Tensor) -> None:
        """Repeat micro-batch 0 of `step` on other ranks. All ranks call this before the optimizer's step.

        Raises ReplayMismatchError on all ranks, naming the rank, its node, its device and a tensor.
        """
        began = time.monotonic()
        self.is_due = False
        self._recorder.samples(metrics.REPLAY_CHECKS.inc())
        zero = torch.zeros((), dtype=torch.int64, device=self._world.device)
        # With --devices-per-rank, the gradients of one rank are on several GPUs.
        own = [self._gradients.get(index, zero).to(zero.device) for index in range(len(self._names))]
        state = [_sum_of(each).to(zero.device) for _, each in self._state()]
        report = RepeatReport(torch.stack(own).tolist(), torch.stack(state).tolist())
        first, second = shifts(self._number, self._world.size)
        self._number += 1
        self._repeat(report, step, batch, scale, first)
        summary = [hash_of(report.own), hash_of(report.state), hash_of(report.replays[0][1])]
        # Almost every check ends here, after one exchange of three numbers per rank.
        if is_clean(self._world.gather_json(summary), first):
            self._last_clean = step
            self.on_cost(time.monotonic() - began)
            return
        self._repeat(report, step, batch, scale, second)
        reports = [
            RepeatReport(each["own"], each["state"], [(rank, sums) for rank, sums in each["replays"]])
            for each in self._world.gather_json(vars(report))
        ]
        self._raise(step, find_wrong_ranks(reports, self._names, [name for name, _ in self._state()]))

    def _repeat(self, report: RepeatReport, step: int, batch: Any, scale: Tensor, shift: int) -> None:
        """Compute the gradients of the rank `shift` after this one, and add their checksums to the report."""
        owner = (self._world.rank + shift) % self._world.size
        theirs = rotated(self._world, batch, shift)
        parameters = self._trained()
        with buffers_kept(self._model):
            # The owner computed with the buffers from before its forward pass.
            self._buffers.put_back()
            seed_micro_step(self._seed, step, 0, owner)
            loss, _ = self._module(theirs)
            # Unlike backward(), this adds nothing to the real gradients, and DDP does not reduce it.
            found = torch.autograd.grad(loss * scale, parameters, allow_unused=True)
        zero = torch.zeros((), dtype=torch.int64, device=self._world.device)
        sums = torch.stack([zero if each is None else _sum_of(each).to(zero.device) for each in found])
        report.replays.append((owner, sums.tolist()))

    def _state(self) -> list[tuple[str, Tensor]]:
        """Return parameters and optimizer state, which are equal on all ranks before a step, with names."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        state: list[tuple[str, Tensor]] = [*self._model.named_parameters()]
        for parameter, values in self._optimizer.state.items():
            for key, value in sorted(values.items()):
                if isinstance(value, Tensor):
                    state.append((f"{key} of {names.get(id(parameter), 'a parameter')}", value))
        return state

    def _raise(self, step: int, verdict: RepeatVerdict) -> None:
        # All ranks differ, and always have: the loss is the cause, not a fault of each machine.
        if not verdict.is_certain and self._last_clean is None and len(verdict.wrong) == self._world.size > 2:
            raise ConfigError(
                "--replay-check: each rank gets other bits from the same micro-batch, so the loss is not "
                "repeatable; draw random numbers from torch's generators, or use --replay-check never"
            )
        position = self._world.position
        device = str(self._world.device)
        places = self._world.gather_json(
            {"node": f"node {position.node_rank} ({position.node_name})", "device": device}
        )
        found = [{"rank": rank, **places[rank], "tensor": name} for rank, name in verdict.wrong.items()]
        node_of = self._world.gather(position.node_rank)
        nodes = sorted({node_of[rank] for rank in verdict.wrong})
        self._recorder.event(
            "replay_mismatch", step=step, ranks=found, certain=verdict.is_certain, clean=self._last_clean
        )
        self._recorder.samples(metrics.REPLAY_MISMATCHES.inc(len(found)))
        named = " or ".join(
            "rank {rank} on {node}, {device}, first in {tensor}".format(**one) for one in found
        )
        if verdict.is_certain:
            named = named.replace(" or rank ", "; rank ")
        clean = self._last_clean
        good = f"of step {clean} or before" if clean is not None else "from before this launch"
        raise ReplayMismatchError(
            f"step {step + 1} does not count: another rank got different bits from the same micro-batch; "
            f"{'wrong' if verdict.is_certain else 'one of these is wrong, or the loss is not repeatable'}: "
            f"{named}; leave that machine out, and resume from a checkpoint {good} with --resume PATH@STEP",
            nodes if verdict.is_certain else (),
            clean,
        )


def replay_every(text: str) -> str:
    """Resolve `--replay-check auto` to the first interval; see `lengthen`."""
    return f"{SHORTEST_SECONDS:g}s" if text == "auto" else text


def lengthen(cadences: MutableMapping[str, Cadence], seconds: float) -> None:
    """Set the interval of `--replay-check auto` after a check that took `seconds`.

    Only rank 0's interval counts, because it decides what is due by the clock.
    """
    cadences["replay"] = Cadence(max(SHORTEST_SECONDS, seconds / COST), "seconds")


def shifts(number: int, size: int) -> tuple[int, int]:
    """Return two rank offsets: whose work each rank repeats in check `number`, and in its second round.

    The second round decides which rank is wrong: a third rank repeats the work, or the one that did it first.
    """
    if size <= 2:  # a single rank shows only transient faults
        return size - 1, 0
    others = size - 1
    first = 1 + number % others
    return first, first % others + 1


def is_clean(summaries: Sequence[Sequence[int]], shift: int) -> bool:
    """Return whether all ranks agree, given [own gradients, state, replayed gradients] of each."""
    size = len(summaries)
    same_state = len({state for _, state, _ in summaries}) == 1
    return same_state and all(
        summaries[(rank + shift) % size][0] == replayed for rank, (_, _, replayed) in enumerate(summaries)
    )


def find_wrong_ranks(
    reports: Sequence[RepeatReport], names: Sequence[str], state_names: Sequence[str]
) -> RepeatVerdict:
    """Find the ranks whose results differ from those of two or more other computations of the same work.

    A majority needs two different ranks, because a broken one may repeat its own fault.
    """
    cases = [("", state_names, [(rank, report.state) for rank, report in enumerate(reports)])]
    for owner, report in enumerate(reports):
        repeats = [
            (rank, sums)
            for rank, other in enumerate(reports)
            for replayed, sums in other.replays
            if replayed == owner
        ]
        cases.append(("the gradient of ", names, [(owner, report.own), *repeats]))
    wrong: dict[int, str] = {}
    unsure: dict[int, str] = {}
    for prefix, tensors, votes in cases:
        right, is_sure = _majority(votes)
        for rank, sums in votes:
            if (not is_sure and len({hash_of(each) for _, each in votes}) > 1) or sums != right:
                reference = right if sums != right else next(s for _, s in votes if s != sums)
                at = next(i for i, (a, b) in enumerate(zip(sums, reference, strict=True)) if a != b)
                (wrong if is_sure else unsure).setdefault(rank, prefix + tensors[at])
    return RepeatVerdict(wrong) if wrong else RepeatVerdict(unsure, is_certain=False)


def _majority(votes: Sequence[tuple[int, Sums]]) -> tuple[Sums, bool]:
    """Return the result that most ranks have, and whether that is more than any other has."""
    ranks: dict[int, set[int]] = {}
    for rank, sums in votes:
        ranks.setdefault(hash_of(sums), set()).add(rank)
    counts = Counter({value: len(each) for value, each in ranks.items()})
    (value, most), *rest = counts.most_common(2)
    right = next(sums for _, sums in votes if hash_of(sums) == value)
    is_sure = not rest or (most > 1 and most > rest[0][1])
    return right, is_sure


def hash_of(sums: Sums) -> int:
    """Return one number for a list of checksums."""
    return int(checksum(torch.tensor(sums or [0])))


def _sum_of(tensor: Tensor) -> Tensor:
    """Return the checksum of a gradient's or a state's bytes; 0.0 and -0.0 count as equal.

    Adding a gradient to zeros turns -0.0 into 0.0. A first gradient may be added to zeros or kept unchanged.
    """
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return checksum(tensor.values() + 0.0) + checksum(tensor.indices())
    return checksum(tensor + 0 if tensor.is_floating_point() else tensor)


def rotated(world: ProcessGroup, batch: Any, shift: int) -> Any:
    """Return the batch of the rank `shift` after this one, on the device; each rank passes its own.

    Raises ConfigError on all ranks if ranks differ in parts of the batch that are not tensors.
    """
    if shift == 0:
        return batch
    payload = io.BytesIO()
    own = None if batch is None else [tensor.cpu() for tensor in tensors_of(batch)]
    torch.save({"tensors": own, "rest": rest_of(batch)}, payload)
    raw = world.rotate_bytes(payload.getvalue(), shift)
    received = torch.load(io.BytesIO(raw), weights_only=True)
    theirs = received["tensors"]
    # The structure and everything besides tensors come from this rank's own batch.
    fits = theirs is None or (
        own is not None and len(own) == len(theirs) and received["rest"] == rest_of(batch)
    )
    if any(world.gather(int(not fits))):
        raise ConfigError(
            "--replay-check: the batches of ranks differ in more than tensors, so no rank can repeat "
            "the work of another; return tensors only, or use --replay-check never"
        )
    if theirs is None:
        return None
    left = iter(theirs)
    return mapped(batch, lambda tensor: next(left).to(tensor.device))


def rest_of(batch: Any) -> str:
    """Describe everything in a batch but its tensors' values: structure, types and other values."""
    return repr(mapped(batch, lambda tensor: torch.empty(0, dtype=tensor.dtype)))


def check_possible(
    compute: ComputeConfig, world: ProcessGroup, strategy: Strategy, model: nn.Module, may_miss_ranks: bool
) -> None:
    """Raise ConfigError if equal work may not give equal bits. All ranks call this."""
    reason = ""
    if may_miss_ranks:
        reason = "with of_rank(), a rank may have no samples in a step; use a dataset without it"
    elif strategy.shards_parameters:
        reason = f"--strategy {compute.strategy} has no rank with a whole model; use --strategy ddp"
    elif compute.compile is not None:
        reason = "--compile may give a repeated step other kernels; remove it"
    elif compute.sync_batchnorm or any(isinstance(each, nn.SyncBatchNorm) for each in model.modules()):
        reason = "SyncBatchNorm waits for all ranks in a step, so no rank can repeat one; train without it"
    elif world.device.type == "cuda" and not compute.deterministic:
        reason = "kernels on GPUs need not repeat their bits; add --deterministic"
    if not reason and len(kinds := {str(each) for each in world.gather_json(_kernels(world.device))}) > 1:
        reason = f"the ranks compute with {' and '.join(sorted(kinds))}; start equal ones"
    if reason:
        raise ConfigError(f"--replay-check: {reason}, or use --replay-check never")


def _kernels(device: torch.device) -> str:
    """Return the facts that decide which kernels run on this rank, and in which order they add."""
    if device.type == "cuda":
        return f"torch {torch.__version__} on {torch.cuda.get_device_name(device)}"
    threads = torch.get_num_threads()
    return f"torch {torch.__version__} with {threads} threads on {torch.backends.cpu.get_cpu_capability()}"
