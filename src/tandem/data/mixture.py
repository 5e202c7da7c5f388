"""Several datasets, mixed by weights that may change at given steps.

The positions of a run are cut into cycles of CYCLE samples. In each cycle, every source has a fixed number of
samples, by largest remainder, at permuted positions. Each source is read in its own order, epoch after epoch,
and keeps its position when the weights change. A sample is thus a function of (seed, step, position), for any
number of ranks.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise, zip_longest
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tandem.data.batch_shares import apportion
from tandem.data.block_order import LANES, BlockOrder, network
from tandem.data.fetch import is_stream, returns_batches
from tandem.data.sampler import BLOCK, GlobalOrder, Numbers
from tandem.data.seeds import derive_seed, derive_seeds
from tandem.errors import ConfigError

CYCLE_BITS = 11
CYCLE = 2**CYCLE_BITS
"""Samples of a cycle. Shares are multiples of 1 / CYCLE."""
MIXTURE = "mixture"
CYCLE_KEY = 7  # the last part of a seed for the permutation of a cycle
SOURCE_KEY = 8  # the same, for the order of a source
ROUND_KEYS = [derive_seed(number, CYCLE_KEY) for number in range(6)]


class Stage(NamedTuple):
    """A stage of the run: from step `start` on, each cycle has `quotas` samples of the sources."""

    start: int
    quotas: tuple[int, ...]


class MixedOrder(GlobalOrder):
    """The order of a mixture; an epoch has as many samples as all sources together.

    `sources`: the order of each source, whose batches are one sample, or one of each lane. Indices count over
    all sources, end to end. `names`: the sources' names, for messages.
    """

    contiguous = True

    def __init__(
        self,
        batch_size: int,
        seed: int,
        sources: Sequence[GlobalOrder],
        stages: Sequence[Stage],
        names: Sequence[str],
    ) -> None:
        super().__init__(sum(source.n for source in sources), batch_size, seed)
        self.algorithm = MIXTURE
        self._sources = list(sources)
        self._stages = list(stages)
        self._names = list(names)
        self._starts = numpy.cumsum([0, *(source.n for source in sources)])
        self._lanes = numpy.array([_lanes_in(source) for source in sources])
        self._lane_tables = [_lane_table(lanes) for lanes in self._lanes.tolist()]
        facts = [(source.n, source.algorithm, source.fingerprint) for source in sources]
        text = json.dumps([self._names, facts, self._stages])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._used_before = [numpy.zeros(len(sources), dtype=numpy.int64)]
        """Samples of each source before each stage."""
        for number, (stage, after) in enumerate(pairwise(self._stages)):
            used = self._used_in(number, (after.start - stage.start) * batch_size)
            self._used_before.append(self._used_before[-1] + used)

    def describe(self) -> tuple[str, bool]:
        stages = []
        for start, quotas in self._stages:
            shares = (f"{name} {quota / CYCLE:.1%}" for name, quota in zip(self._names, quotas, strict=True))
            stages.append(f"{f'from step {start:,}: ' if start else ''}{', '.join(shares)}")
        return f"mixture: {'; '.join(stages)}", False

    def used_before(self, step: int) -> list[int]:
        """Return how many samples of each source all steps before `step` have used."""
        number = self._stage_at(step)
        positions = (step - self._stages[number].start) * self.batch_size
        used: list[int] = (self._used_before[number] + self._used_in(number, positions)).tolist()
        return used

    def open_blocks(self, positions: slice) -> int:
        """Return how many blocks the samples at `positions` of a batch come from, at a time."""
        shared = zip(self._sources, self._lanes.tolist(), strict=True)
        return sum(
            source.open_blocks(self._lanes_for(positions, lanes))
            for source, lanes in shared
            if isinstance(source, BlockOrder)
        )

    def blocks(self, start: int, stop: int, positions: slice) -> list[int]:
        """Return the blocks for these steps like `BlockOrder.blocks`, numbered over all sources in blocks."""
        needed = []
        before = 0
        used = zip(self.used_before(start), self.used_before(stop), strict=True)
        for source, lanes, (first, last) in zip(self._sources, self._lanes.tolist(), used, strict=True):
            if not isinstance(source, BlockOrder):
                continue
            own = self._lanes_for(positions, lanes)
            blocks = source.blocks(first // lanes, -(-last // lanes), own)
            needed.append([before + block for block in blocks])
            before += len(source.sizes)
        # All sources are read at the same time.
        in_turn = chain.from_iterable(zip_longest(*needed))
        return [block for block in in_turn if block is not None]

    def _lanes_for(self, positions: slice, lanes: int) -> slice:
        """Return the lanes of a source that these positions of a batch read; see `_members`."""
        own = range(self.batch_size)[positions]
        # Because of the stride, at most four samples of each source are in another part of the batch.
        spare = 1 + 4 * len(self._sources) * lanes // self.batch_size
        first = own[0] * lanes // self.batch_size - spare
        last = own[-1] * lanes // self.batch_size + spare
        return slice(max(0, first), min(lanes, last + 1))

    def _computed(self, epoch: int, positions: Numbers) -> Tensor:
        steps = epoch * self.steps_per_epoch + positions[:, 0] // self.batch_size
        places = positions[0] % self.batch_size
        indices = numpy.empty(positions.shape, dtype=numpy.int64)
        for rows in self._runs(steps):
            indices[rows] = self._indices(*self._members(steps[rows], places))
        return torch.from_numpy(indices)

    def _runs(self, steps: Numbers) -> Iterator[slice]:
        """Cut consecutive steps into runs of one stage, and of few samples, which limits the memory."""
        most = max(1, BLOCK // self.batch_size)
        stages = [self._stage_at(step) for step in steps.tolist()]
        begin = 0
        for row in range(1, len(stages) + 1):
            if row == len(stages) or stages[row] != stages[begin] or row - begin == most:
                yield slice(begin, row)
                begin = row

    def _stage_at(self, step: int) -> int:
        return max(number for number, stage in enumerate(self._stages) if stage.start <= step)

    def _members(self, steps: Numbers, places: Numbers) -> tuple[Numbers, Numbers]:
        """Return (source, its number in the source's order) at `places` of the batches of steps of one stage.

        The samples of a batch are sorted by their lanes, so that a rank's share comes from few lanes.
        """
        number = self._stage_at(int(steps[0]))
        stage = self._stages[number]
        begin = int(steps[0] - stage.start) * self.batch_size
        end = int(steps[-1] + 1 - stage.start) * self.batch_size
        cycles = numpy.arange(begin // CYCLE, -(-end // CYCLE))
        slots = self._slots(number, cycles)
        lanes = numpy.take_along_axis(self._lanes_of_slots(number, cycles), slots, 1)
        first = begin - int(cycles[0]) * CYCLE
        batches = lanes.reshape(-1)[first : first + end - begin].reshape(len(steps), self.batch_size)
        chosen = batches.argsort(axis=1, kind="stable")[:, places]
        chosen += first + numpy.arange(len(steps))[:, None] * self.batch_size
        slot = slots.reshape(-1)[chosen]
        quotas = numpy.asarray(stage.quotas)
        sources = numpy.repeat(numpy.arange(len(quotas)), quotas)[slot]
        counts = self._used_before[number][sources] + cycles[chosen // CYCLE] * quotas[sources]
        return sources, counts + slot - (quotas.cumsum() - quotas)[sources]

    def _slots(self, number: int, cycles: Numbers) -> Numbers:
        """Return the slot of each position, [cycles, CYCLE]; the slots of a source follow each other."""
        quotas = self._stages[number].quotas
        base = derive_seed(self.seed, number, CYCLE_KEY)
        keys = derive_seeds(base, torch.from_numpy(cycles)).numpy().view(numpy.uint64)
        drawn = network(numpy.arange(CYCLE, dtype=numpy.uint64), keys[:, None], CYCLE_BITS, ROUND_KEYS)
        # The smallest type, because NumPy sorts 16 bits by radix.
        sources = numpy.repeat(numpy.arange(len(quotas), dtype=numpy.int16), quotas)[drawn.view(numpy.int64)]
        # The sort must be stable, because a source is read in its own order.
        positions = sources.argsort(axis=1, kind="stable")
        slots = numpy.empty_like(positions)
        numpy.put_along_axis(slots, positions, numpy.arange(CYCLE)[None], axis=1)
        return slots

    def _lanes_of_slots(self, number: int, cycles: Numbers) -> Numbers:
        """Return the lane from which each slot is read, in units of 1 / LANES of a source's lanes."""
        parts = []
        used = self._used_before[number].tolist()
        for lanes, quota, before in zip(self._lane_tables, self._stages[number].quotas, used, strict=True):
            begins = (before + cycles * quota) % len(lanes)
            parts.append(numpy.resize(lanes, quota + len(lanes))[begins[:, None] + numpy.arange(quota)])
        return numpy.concatenate(parts, axis=1)

    def _used_in(self, number: int, positions: int) -> Numbers:
        """Return the samples of each source at the first `positions` of a stage."""
        cycles, rest = divmod(positions, CYCLE)
        quotas = numpy.asarray(self._stages[number].quotas)
        slots = self._slots(number, numpy.array([cycles]))[0, :rest]
        of_rest = numpy.bincount(numpy.searchsorted(quotas.cumsum(), slots, "right"), minlength=len(quotas))
        used: Numbers = of_rest + cycles * quotas
        return used

    def _indices(self, sources: Numbers, counts: Numbers) -> Numbers:
        indices = numpy.empty(sources.shape, dtype=numpy.int64)
        for number, source in enumerate(self._sources):
            chosen = sources == number
            own = counts[chosen]
            if isinstance(source, BlockOrder):
                # Neighbors get lanes that are far apart, so that any few of them are spread evenly.
                groups, places = numpy.divmod(own, source.lanes)
                own = groups * source.lanes + places * _stride(source.lanes) % source.lanes
            epochs, places = numpy.divmod(own, source.steps_per_epoch * source.batch_size)
            found = numpy.empty(len(places), dtype=numpy.int64)
            for epoch in numpy.unique(epochs).tolist():
                of_epoch = epochs == epoch
                found[of_epoch] = source.at(epoch, places[of_epoch]).numpy()
            indices[chosen] = self._starts[number] + found
        return indices


def _lanes_in(source: GlobalOrder) -> int:
    return source.lanes if isinstance(source, BlockOrder) else LANES


def _stride(lanes: int) -> int:
    """Return the number coprime to `lanes` that is closest to the golden section of `lanes`."""
    reaching = [number for number in range(1, lanes + 1) if math.gcd(number, lanes) == 1]
    return min(reaching, key=lambda number: abs(number - lanes * (5**0.5 - 1) / 2))


def _lane_table(lanes: int) -> Numbers:
    """Return the lane of each of `lanes` neighbors, in units of 1 / LANES of them; int16."""
    return (numpy.arange(lanes) * _stride(lanes) % lanes * LANES // lanes).astype(numpy.int16)


class Mixture(Dataset[Any]):
    """The samples of several datasets, end to end; `order` mixes them. See `mix`."""

    def __init__(self, datasets: Mapping[str, Any], stages: Sequence[Stage]) -> None:
        self.datasets = list(datasets.values())
        self.names = list(datasets)
        self.stages = list(stages)
        self._ends = list(accumulate(len(dataset) for dataset in self.datasets))
        self._starts = [0, *self._ends[:-1]]
        self._sizes = [_block_sizes(dataset) for dataset in self.datasets]
        self._whole = all(returns_batches(dataset) for dataset in self.datasets)

    def order(self, _n: int, batch_size: int, seed: int) -> MixedOrder:
        """Return the order of the samples. Raises ConfigError if there are fewer than one batch."""
        orders: list[GlobalOrder] = []
        for name, dataset, sizes in zip(self.names, self.datasets, self._sizes, strict=True):
            # Seed by name, so that a source added later does not change this one's order.
            digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
            own_seed = derive_seed(seed, digest, SOURCE_KEY)
            if sizes is None:
                orders.append(GlobalOrder(len(dataset), 1, own_seed))
            else:
                orders.append(BlockOrder(len(dataset), min(LANES, len(sizes)), own_seed, sizes))
        return MixedOrder(batch_size, seed, orders, self.stages, self.names)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"a sample is outside of range({len(self)})")
        number = int(numpy.searchsorted(self._ends, place, side="right"))
        return self.datasets[number][place - self._starts[number]]

    def __getitems__(self, indices: Sequence[int] | Tensor) -> Any:
        """Return a list of samples, or a finished batch if all datasets return batches."""
        chosen = numpy.asarray(indices, dtype=numpy.int64)
        numbers = numpy.searchsorted(self._ends, chosen, side="right")
        places = []
        parts = []
        for number in numpy.unique(numbers).tolist():
            places.append(numpy.flatnonzero(numbers == number))
            of_source = (chosen[places[-1]] - self._starts[number]).tolist()
            parts.append(self._read(self.datasets[number], of_source))
        if not parts:
            return []
        back = numpy.concatenate(places).argsort()
        if self._whole:
            return _joined(parts, torch.from_numpy(back))
        samples = [sample for part in parts for sample in part]
        return [samples[place] for place in back.tolist()]

    def _read(self, dataset: Any, indices: list[int]) -> Any:
        # A dataset that returns batches is read one by one next to one that does not.
        if hasattr(dataset, "__getitems__"):
            read = dataset.__getitems__(indices)
            if self._whole or isinstance(read, list):
                return read
        return [dataset[index] for index in indices]

    def will_need(self, blocks: Sequence[int]) -> None:
        """Pass the announcement to the datasets that the blocks are in."""
        for dataset, begin, end in self._in_blocks():
            own = [block - begin for block in blocks if begin <= block < end]
            if own and hasattr(dataset, "will_need"):
                dataset.will_need(own)

    def hold(self, blocks: int, processes: int) -> None:
        """Divide the number of blocks among the datasets, which have up to LANES lanes each."""
        lanes = [min(LANES, end - begin) for _, begin, end in self._in_blocks()]
        for own, (dataset, _, _) in zip(lanes, self._in_blocks(), strict=True):
            if hasattr(dataset, "hold"):
                dataset.hold(-(-blocks * own // sum(lanes)), processes)

    def _in_blocks(self) -> list[tuple[Any, int, int]]:
        """Return (dataset, its first block, the block after its last) of all datasets in blocks."""
        stored = [
            (dataset, sizes) for dataset, sizes in zip(self.datasets, self._sizes, strict=True) if sizes
        ]
        ends = list(accumulate(len(sizes) for _, sizes in stored))
        return [(dataset, end - len(sizes), end) for (dataset, sizes), end in zip(stored, ends, strict=True)]


def _joined(parts: Sequence[Any], back: Tensor) -> Any:
    """Concatenate batches of one structure, and return their rows in the order `back`."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))[back]
    if isinstance(first, Mapping):
        return {name: _joined([part[name] for part in parts], back) for name in first}
    if isinstance(first, tuple | list):
        if len({len(part) for part in parts}) > 1:
            counts = " and ".join(map(str, sorted({len(part) for part in parts})))
            raise ConfigError(f"mix(): batches of {counts} parts; expected the same from all datasets")
        return type(first)(_joined(values, back) for values in zip(*parts, strict=True))
    raise ConfigError(f"mix(): batches contain a {type(first).__name__}; expected tensors")


def _block_sizes(dataset: Any) -> list[int] | None:
    return list(dataset.block_sizes()) if hasattr(dataset, "block_sizes") else None


def mix(
    sources: Mapping[str, tuple[Any, float]], stages: Mapping[int, Mapping[str, float]] | None = None
) -> Mixture:
    """Return a mixture of map-style datasets, as in `mix({"web": (web, 3), "code": (code, 1)})`.

    Args: sources: {name: (dataset, weight)}. Weights are relative: 3 and 1 are 75% and 25% of the samples, to
    1/2048. stages: {step: {name: weight}}, other weights from a step on.

    A source is read in its own order, by blocks if it has them, and again from its start when it ends. Raises
    ConfigError for an invalid dataset, weight or step.
    """
    if not sources:
        raise ConfigError("mix(): expected at least one source")
    arguments: tuple[tuple[str, Any, str], ...] = (
        ("sources", sources, "{name: (dataset, weight)}"),
        ("stages", stages or {}, "{step: {name: weight}}"),
    )
    for what, given, form in arguments:
        if not isinstance(given, Mapping):
            raise ConfigError(f"mix(): {what}: invalid type {type(given).__name__}; expected a dict, {form}")
    source: Any
    for name, source in sources.items():
        if not isinstance(source, tuple | list) or len(source) != 2:
            got = f"{len(source)} values" if isinstance(source, tuple | list) else type(source).__name__
            raise ConfigError(f"mix(): {name}: got {got}; expected (dataset, weight), such as (dataset, 3)")
        dataset, _ = source
        if problem := _problem_of(dataset):
            raise ConfigError(f"mix(): {name}: {problem}")
    made = [Stage(0, _quotas({name: weight for name, (_, weight) in sources.items()}))]
    for step, weights in sorted((stages or {}).items()):
        if not isinstance(step, int) or step < 1:
            raise ConfigError(f"mix(): stages: invalid step {step!r}; expected an integer >= 1")
        entry: Any = weights
        if not isinstance(entry, Mapping):
            kind = type(entry).__name__
            raise ConfigError(f"mix(): stages: step {step}: invalid type {kind}; expected {{name: weight}}")
        if set(weights) != set(sources):
            raise ConfigError(
                f"mix(): stages: step {step}: weights of {', '.join(map(str, weights)) or 'nothing'}; "
                f"expected those of {', '.join(sources)}"
            )
        made.append(Stage(step, _quotas({name: weights[name] for name in sources})))
    return Mixture({name: dataset for name, (dataset, _) in sources.items()}, made)


def _problem_of(dataset: Any) -> str:
    if hasattr(dataset, "of_rank") or is_stream(dataset) or not hasattr(dataset, "__len__"):
        return f"got a {type(dataset).__name__}; expected a dataset with __len__ and __getitem__"
    if isinstance(dataset, Mixture):
        return "got a mixture; name its sources instead"
    if hasattr(dataset, "augmented") and getattr(dataset, "augment", True) is not None:
        return f"a {type(dataset).__name__} augments whole batches, which works only without a mixture"
    return "" if len(dataset) else "the dataset is empty"


def _quotas(weights: Mapping[str, float]) -> tuple[int, ...]:
    """Return the samples of each source in a cycle: at least one, unless the weight is 0."""
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ConfigError(f"mix(): {name}: invalid weight {weight!r}; expected a number >= 0")
    used = {name: weight for name, weight in weights.items() if weight}
    if not used:
        raise ConfigError("mix(): all weights are 0; expected one above 0")
    quotas = dict(zip(used, apportion(CYCLE, list(used.values())), strict=True))
    return tuple(quotas.get(name, 0) for name in weights)
