"""Fetch a batch from a map-style dataset: all at once if the result is the same, else sample by sample.

In any process, the result depends only on (seed, epoch, indices). Each sample is created with generators
seeded for (seed, epoch, index), so it is the same in every batch that contains it. Code that draws random
numbers for a whole batch (a collate function, a batch-wise `__getitems__`) gets generators seeded for the
first sample of the batch.
"""

import inspect
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import update_wrapper
from operator import length_hint
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from tandem.data.bad_samples import why_not_collated
from tandem.data.host_generators import (
    HOST_GENERATORS,
    AllNotedReads,
    HostGenerator,
    KeptGenerators,
    NotedReads,
)
from tandem.data.loader_messages import MESSAGE_BYTES
from tandem.data.sampler import BatchKey
from tandem.data.seeds import derive_seed, seed_host_generators
from tandem.errors import ConfigError
from tandem.text import add_note, in_samples, notes_of, with_type

# Pass `step` and `epoch` to those methods of a task that have parameters with these names.

NAMES = ("step", "epoch")


@dataclass
class StepContext:
    """The current or last optimizer step, 0-based; 0 before the first one.

    `epoch_steps`: the number of steps in an epoch.
    """

    step: int = 0
    epoch_steps: int = 1

    @property
    def epoch(self) -> int:
        """The 0-based epoch that contains `step`."""
        return self.step // self.epoch_steps

    def resume(self, finished: int, epoch_steps: int) -> None:
        """Set the state after `finished` steps."""
        self.step = max(finished - 1, 0)
        self.epoch_steps = epoch_steps


class WithStepContext:
    """A method that is called with the current `step` and `epoch`, if it has these parameters.

    The values are those of `moment`; `at` calls the method with other ones.
    """

    def __init__(self, method: Callable[..., Any], names: tuple[str, ...], moment: StepContext) -> None:
        self.method = method
        self._names = names
        self._moment = moment
        # Keep the method's name and signature for lookups and messages.
        update_wrapper(self, method, updated=())

    def __call__(self, *given: Any) -> Any:
        return self.at(self._moment.step, self._moment.epoch, *given)

    def at(self, step: int, epoch: int, *given: Any) -> Any:
        """Call the method for a given step: batches are prepared before their step begins."""
        values = dict(zip(NAMES, (step, epoch), strict=True))
        return self.method(*given, **{name: values[name] for name in self._names})


def with_step_context(method: Any, given: int, moment: StepContext) -> Any:
    """Wrap `method` in `WithStepContext` if it has more than `given` parameters, among them one of NAMES."""
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):  # a builtin may have no signature
        return method
    named = [
        each.name
        for index, each in enumerate(parameters)
        if each.kind is each.KEYWORD_ONLY or (each.kind is each.POSITIONAL_OR_KEYWORD and index >= given)
    ]
    names = tuple(name for name in NAMES if name in named)
    return WithStepContext(method, names, moment) if names else method


Batch = Any
"""Result of a dataset or collate function: tensors in tuples, lists, dicts, mappings, dataclasses."""
Collate = Callable[[list[Any]], Batch]
Fetch = Callable[[Tensor, int, int], Batch]
"""(int64 indices [B], epoch, seed) -> a finished batch."""
BATCH = 1  # the last part of a seed for a whole batch


def is_stream(dataset: Any) -> bool:
    """Return True if samples can only be read one after another."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def whole_fetch(dataset: Any, collate: Collate | None = None, augment: bool = False) -> Fetch | None:
    """Return a function that fetches a whole batch at once; None if samples must be read one by one.

    It exists for a dataset that returns finished batches (by `augmented` with `augment`, else by
    `__getitems__`). It also exists for one that only selects rows of tensors that default_collate would
    stack, even inside torch's Subset and StackDataset. A class with its own `__getitem__` is read sample by
    sample, whatever its base class.
    """
    kind = type(dataset)
    getitem = getattr(kind, "__getitem__", None)
    # A subclass that overrides either method returns other samples, so the parent may not be read directly.
    if getitem is Subset.__getitem__ and kind.__getitems__ is Subset.__getitems__:
        inner, chosen = whole_fetch(dataset.dataset, collate, augment), torch.as_tensor(dataset.indices)
        return inner and (lambda indices, epoch, seed: inner(chosen[indices], epoch, seed))
    if augment and hasattr(dataset, "augmented"):
        augmented: Fetch = dataset.augmented
        return augmented
    # Compare the function, not the class: a subclass with its own __getitem__ transforms the rows.
    if collate is None and getitem is TensorDataset.__getitem__:
        return lambda indices, epoch, seed: [
            tensor.index_select(0, indices.to(tensor.device)) for tensor in dataset.tensors
        ]
    if collate is None and getitem is StackDataset.__getitem__:
        return _stacked(dataset, augment)
    return _seeded(dataset) if returns_batches(dataset) else None


def returns_batches(dataset: Any) -> bool:
    """Return True if `__getitems__` returns finished batches; some datasets return a list of samples."""
    if isinstance(dataset, Subset):
        return returns_batches(dataset.dataset)
    # The trial below needs a sample.
    if isinstance(dataset, StackDataset) or not hasattr(dataset, "__getitems__") or len(dataset) == 0:
        return False
    # The trial call may draw random numbers, and must not change what the run draws later.
    with KeptGenerators():
        seed_host_generators(0)
        return not isinstance(dataset.__getitems__([0]), list)


def begin_epoch(dataset: Any, epoch: int, seed: int) -> None:
    """Call `set_epoch(epoch)` of a training set that has it, even inside torch's Subset and ConcatDataset.

    Call this in each process that reads samples, before its first batch of an epoch.
    """
    if not hasattr(dataset, "set_epoch"):
        inner = [dataset.dataset] if isinstance(dataset, Subset) else []
        for part in dataset.datasets if isinstance(dataset, ConcatDataset) else inner:
            begin_epoch(part, epoch, seed)
        return
    with KeptGenerators():
        seed_host_generators(derive_seed(seed, epoch))
        dataset.set_epoch(epoch)


class SampleFetcher(Dataset[Batch]):
    """Batches by key, assembled from single samples without changing the global generators.

    Seeding three generators often takes longer than creating a sample. Therefore only generators that this
    dataset is known to use are seeded for each sample. After each batch, the others are checked: one whose
    state has changed was used, and so was one whose seed or state was read. The batch is then created again,
    so the result does not depend on when this was found.

    A `__getitems__` that lists samples is used as long as it draws no random numbers. Otherwise they would
    depend on which samples are fetched together, and so on the number of ranks.
    """

    def __init__(self, dataset: Any, seed: int, collate: Collate | None) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate = collate or default_collate
        self._lists = hasattr(dataset, "__getitems__")
        self._epoch: int | None = None
        self._seeded: set[HostGenerator] = set()
        self._reads: NotedReads = AllNotedReads()  # in the first batch of each process

    def __getitem__(self, key: BatchKey) -> Batch:
        try:
            return self._batch(key)
        except Exception as error:
            if get_worker_info() is None or _can_be_sent(type(error)):
                raise
            # An error whose class cannot be pickled would never leave the worker.
            sent = RuntimeError(with_type(error))
            for note in notes_of(error):
                sent.add_note(note)
            raise sent from error

    def _batch(self, key: BatchKey) -> Batch:
        epoch, indices, step = key
        of_epoch = derive_seed(self.seed, epoch)
        # An evaluation may read the same dataset, and its epoch is always 0.
        if step is not None and epoch != self._epoch:
            begin_epoch(self.dataset, epoch, self.seed)
            self._epoch = epoch
        with KeptGenerators() as generators:
            samples = None
            # This takes a few rounds at most: each failed one adds a generator to `_seeded`, and there are
            # three.
            while samples is None:
                samples = self._samples(indices, of_epoch, generators)
            # default_collate never draws, so it needs no seeds.
            if self.collate is not default_collate:
                generators.seed(derive_seed(indices[0], BATCH, start=of_epoch))
            return collated(self.collate, samples, step, epoch, indices)

    def _samples(self, indices: list[int], of_epoch: int, generators: KeptGenerators) -> list[Any] | None:
        """Return the samples; None if they used a generator that was not seeded for each sample."""
        if len(self._seeded) == len(HOST_GENERATORS):
            return self._one_by_one(indices, of_epoch)
        with self._reads:
            samples = self._one_by_one(indices, of_epoch) if self._seeded else self._unseeded(indices)
        used = self._reads.seen.union(generators.changed())
        if type(self._reads) is AllNotedReads:
            self._reads = NotedReads()
        if used <= self._seeded:
            return samples
        self._seeded |= used
        return None

    def _unseeded(self, indices: list[int]) -> list[Any]:
        dataset = self.dataset
        if self._lists:
            with _naming(lambda: indices):
                samples: list[Any] = dataset.__getitems__(indices)
            return samples
        # A comprehension is faster than a loop that counts; the iterator knows how far it has come.
        rest = iter(indices)
        try:
            return [dataset[index] for index in rest]
        except Exception as error:
            add_note(error, in_samples([indices[-1 - length_hint(rest)]]))
            raise

    def _one_by_one(self, indices: list[int], of_epoch: int) -> list[Any]:
        samples: list[Any] = []
        with _naming(lambda: indices[len(samples) : len(samples) + 1]):
            for index in indices:
                seed = derive_seed(index, start=of_epoch)
                for generator in self._seeded:
                    generator.seed(seed)
                samples.append(self.dataset[index])
        return samples


@contextmanager
def _naming(samples: Callable[[], Sequence[int]]) -> Iterator[None]:
    """Add a note with the indices of `samples` to an error in this block."""
    try:
        yield
    except Exception as error:
        if named := samples():
            add_note(error, in_samples(named))
        raise


def _can_be_sent(kind: type[Exception]) -> bool:
    """Return True if a loader process can send such an error; otherwise its rank would wait forever."""
    try:
        pickle.dumps(kind)
    except Exception:
        return False
    return True


def collated(
    collate: Collate | None,
    samples: list[Any],
    step: int | None,
    epoch: int,
    indices: Sequence[int] | None = None,
) -> Batch:
    """Collate a batch of the training step `step`; None: not for training.

    `indices`: those of the samples, for messages. Raises ConfigError for samples that default_collate cannot
    combine.
    """
    if collate is not None and collate is not default_collate:
        with _naming(lambda: indices or ()):
            if step is not None and isinstance(collate, WithStepContext):
                return collate.at(step, epoch, samples)
            return collate(samples)
    try:
        return _collated_by_default(samples)
    except Exception as error:
        if problem := why_not_collated(samples, indices, error):
            raise ConfigError(problem) from error
        raise


def _collated_by_default(samples: list[Any]) -> Batch:
    """Return what default_collate returns; faster for tuples of tensors, by a quarter."""
    first = samples[0]
    if type(first) is tuple and all(type(part) is Tensor for part in first):
        with suppress(ValueError):  # tuples of different lengths, about which default_collate complains
            return [_stacked_column(column) for column in zip(*samples, strict=True)]
    return default_collate(samples)


def _stacked_column(column: tuple[Tensor, ...]) -> Tensor:
    # In a loader process, torch's function would create a file in /dev/shm for a small tensor, too.
    # A sparse tensor has no `nbytes`.
    size = len(column) * column[0].numel() * column[0].element_size()
    if get_worker_info() is None or size <= MESSAGE_BYTES:
        return torch.stack(column)
    stacked: Tensor = default_collate(list(column))
    return stacked


def _stacked(dataset: StackDataset[Any], augment: bool) -> Fetch | None:
    """Fetch each part of a StackDataset at once, and combine them like default_collate."""
    parts = dataset.datasets
    names = list(parts) if isinstance(parts, dict) else range(len(parts))
    fetches = [whole_fetch(parts[name], None, augment) for name in names]
    if None in fetches:
        return None

    def fetch(indices: Tensor, epoch: int, seed: int) -> Batch:
        batches = [part(indices, epoch, seed) for part in fetches if part is not None]
        return dict(zip(names, batches, strict=True)) if isinstance(parts, dict) else batches

    return fetch


def _seeded(dataset: Any) -> Fetch:
    """Call a batch-wise `__getitems__` with generators seeded for the batch, because it may draw."""

    def fetch(indices: Tensor, epoch: int, seed: int) -> Batch:
        with KeptGenerators():
            seed_host_generators(derive_seed(seed, epoch, int(indices[0]), BATCH))
            return dataset.__getitems__(indices)

    return fetch
