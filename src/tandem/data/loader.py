"""Batches on the device, in the sampler's order; their randomness depends only on (seed, epoch, index).

A dataset that can return a whole batch is read in this process. All others use torch's DataLoader and its
workers. The state of a loader is never saved: it starts again from a step.
"""

import errno
import gc
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cache, partial
from types import NoneType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from tandem.data.datasets import TensorImages, TensorRows
from tandem.data.fetch import Batch, Collate, Fetch, SampleFetcher, begin_epoch, whole_fetch
from tandem.data.loader_messages import MESSAGE_BYTES, prepare_messages
from tandem.data.sampler import BatchKey, TrainBatches
from tandem.errors import ConfigError, TandemError
from tandem.process import (
    ReadFile,
    allow_open_files,
    close_device_files,
    end_with_parent,
    files_read_here,
    open_files,
    reopen,
)
from tandem.signals import ignore_stop_signals
from tandem.torch_private import end_loader_processes, loader_pids

# Keep small datasets on the GPU: batches are gathered there, and only indices cross the bus.

MOST_BYTES = 256 * 2**20
"""Limit per dataset: little for any GPU, and enough for MNIST and CIFAR as stored in their files."""
# The tensors on the GPU are freed with the dataset.
_copies: "WeakKeyDictionary[Any, dict[torch.device, Any]]" = WeakKeyDictionary()


def cached_on_device(dataset: Any, device: torch.device) -> Any:
    """Return `dataset` with its tensors on `device`, moved once; unchanged on a CPU or if unsuitable.

    Suitable datasets select rows of tensors and compute at most a normalization (TensorDataset, TensorRows,
    TensorImages without augmentation), up to MOST_BYTES; so is a Subset of one. The batches are the same.
    """
    if device.type == "cpu" or not _is_small(dataset):
        return dataset
    made = _copies.setdefault(dataset, {})
    if device not in made:
        made[device] = _changed(dataset, lambda tensor: tensor.to(device))
    return made[device]


def select_batch(dataset: Any, indices: Tensor) -> Any:
    """Return a batch of a dataset that `cached_on_device` has moved, for indices [B] on its device."""
    if isinstance(dataset, TensorDataset):
        return [tensor.index_select(0, indices) for tensor in dataset.tensors]
    return dataset.__getitems__(indices)


def _is_small(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return type(dataset.dataset) is not Subset and _is_small(dataset.dataset)
    tensors = _tensors_in(dataset)
    on_the_host = all(tensor.device.type == "cpu" for tensor in tensors)
    return bool(tensors) and on_the_host and sum(tensor.nbytes for tensor in tensors) <= MOST_BYTES


def _tensors_in(dataset: Any) -> tuple[Tensor, ...]:
    # A subclass may compute something else from its tensors, so isinstance() is too weak here.
    if type(dataset) is TensorDataset:
        return dataset.tensors
    if type(dataset) is TensorRows:
        return dataset.inputs, dataset.targets
    if type(dataset) is TensorImages and dataset.augment is None:
        return dataset.images, dataset.labels
    return ()


def _changed(dataset: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Copy the dataset with changed tensors; a Subset becomes a dataset of only its rows."""
    if type(dataset) is Subset:
        rows = torch.as_tensor(dataset.indices)
        chosen = _changed(dataset.dataset, lambda tensor: tensor.index_select(0, rows))
        return _changed(chosen, change)
    made = copy(dataset)
    if isinstance(made, TensorDataset):
        made.tensors = tuple(map(change, made.tensors))
    elif isinstance(made, TensorRows):
        made.inputs, made.targets = change(made.inputs), change(made.targets)
    else:
        made.images, made.labels = change(made.images), change(made.labels)
    return made


MOST_WORKERS = 8
"""Limit of `--workers auto`: each is a process with its own batches in /dev/shm."""


def train_batches(
    dataset: Any,
    sampler: TrainBatches,
    *,
    seed: int,
    workers: int = 0,
    collate: Collate | None = None,
    device: torch.device,
) -> Iterator[Batch]:
    """Yield this rank's micro-batches, from the sampler's first step to its last, on `device`."""
    fetch = _fetch_there(dataset, collate, device) or whole_fetch(dataset, collate, augment=True)
    if fetch is None:
        yield from _loaded(SampleFetcher(dataset, seed, collate), sampler, workers, device)
        return
    last = None
    for epoch, indices in sampler.micro_batches():
        if epoch != last:
            begin_epoch(dataset, epoch, seed)
            last = epoch
        yield moved(fetch(indices, epoch, seed), device)


def share_batches(
    dataset: Any,
    rank: int,
    world_size: int,
    batch_size: int,
    *,
    seed: int = 0,
    workers: int = 0,
    collate: Collate | None = None,
    device: torch.device,
) -> Iterator[Batch]:
    """Yield the batches of `kinds.evaluation_batches` for a map-style dataset."""
    share = range(rank, len(dataset), world_size)
    batches = [share[start : start + batch_size] for start in range(0, len(share), batch_size)]
    yield from _made(dataset, batches, seed, workers, collate, device)


def joint_batches(
    dataset: Any,
    rank: int,
    world_size: int,
    batch_size: int,
    *,
    seed: int = 0,
    workers: int = 0,
    collate: Collate | None = None,
    device: torch.device,
) -> Iterator[tuple[Batch, range | None]]:
    """Like `share_batches`, but with the same number of samples on all ranks, for joint forward passes.

    Each batch comes with None if its samples are only on this rank, else with the indices of its samples. The
    samples that do not divide evenly among the ranks come last, and are the same on all ranks.
    """
    even = len(dataset) // world_size * world_size
    share = range(rank, even, world_size)
    rest = range(even, len(dataset))
    alone = [share[start : start + batch_size] for start in range(0, len(share), batch_size)]
    shared = [rest[start : start + batch_size] for start in range(0, len(rest), batch_size)]
    made = _made(dataset, [*alone, *shared], seed, workers, collate, device)
    yield from zip(made, [*(None for _ in alone), *shared], strict=True)


def _made(
    dataset: Any,
    batches: list[range],
    seed: int,
    workers: int,
    collate: Collate | None,
    device: torch.device,
) -> Iterator[Batch]:
    """Yield the batches with these indices."""
    fetch = _fetch_there(dataset, collate, device) or whole_fetch(dataset, collate)
    if fetch is None:
        keys = [(0, list(indices), None) for indices in batches]
        yield from _loaded(SampleFetcher(dataset, seed, collate), keys, workers, device)
        return
    for indices in batches:
        yield moved(fetch(torch.tensor(indices), 0, seed), device)


def _fetch_there(dataset: Any, collate: Collate | None, device: torch.device) -> Fetch | None:
    """Return a function that fetches a batch on the GPU from a small set (`cached_on_device`), or None."""
    there = cached_on_device(dataset, device) if collate is None else dataset
    return None if there is dataset else lambda indices, *_: select_batch(there, moved(indices, device))


def loader_processes(wanted: Literal["auto"] | int, cores: int) -> int:
    """Return the number of loader processes for `--workers` and a rank with `cores` CPUs.

    `auto` leaves one CPU for the rank itself. The samples and their randomness do not depend on it.
    """
    return min(cores - 1, MOST_WORKERS) if wanted == "auto" else wanted


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor in nested containers to `device`; asynchronous from pinned memory."""

    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.device == device else tensor.to(device, non_blocking=True)

    return mapped(batch, move)


def batch_size_of(batch: Batch) -> int:
    """Return the number of samples: the length of the first tensor with a dimension.

    Raises ConfigError if there is none.
    """
    tensor = tensor_of(batch)
    if tensor is None:
        raise ConfigError("a batch has no tensor; the first one's length is the number of its samples")
    return len(tensor)


def tensor_of(batch: Batch) -> Tensor | None:
    """Return the first tensor with a dimension in tuples, lists, dicts and dataclasses, or None."""
    return next((tensor for tensor in tensors_of(batch) if tensor.dim()), None)


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Yield the tensors of a batch, in the order of `mapped`."""
    if isinstance(batch, Tensor):
        yield batch
        return
    if is_dataclass(batch):
        batch = [getattr(batch, each.name) for each in fields(batch)]
    if isinstance(batch, Mapping | list | tuple):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_of(part)


def parts_of(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Split a batch along the first dimension of its tensors; everything else is in every part.

    `sizes` must add up to the batch. A tensor of another length belongs to no sample, so it is in every part.
    """
    samples = sum(sizes)
    begin = 0
    parts = []

    def cut(tensor: Tensor) -> Tensor:
        # A tensor without dimensions cannot be sliced; it is a value of the whole batch.
        return tensor[begin : begin + size] if tensor.dim() and len(tensor) == samples else tensor

    for size in sizes:
        parts.append(mapped(batch, cut))
        begin += size
    return parts


def _loaded(
    samples: SampleFetcher, keys: Iterable[BatchKey], workers: int, device: torch.device
) -> Iterator[Batch]:
    """Load batches in this process, or with torch's DataLoader and its workers.

    A whole batch is one item for torch, so that `samples` creates it.
    """
    if not workers:
        yield from (moved(samples[key], device) for key in keys)
        return
    loader: DataLoader[Batch] = DataLoader(
        samples,
        sampler=keys,
        # torch must not collate again: an item is a finished batch.
        batch_size=None,
        num_workers=workers,
        collate_fn=_identity,
        pin_memory=device.type == "cuda",  # by a thread next to the workers
        worker_init_fn=partial(_start_worker, os.getpid(), _is_of_main_thread(), files_read_here()),
        # A rank is started by a fork server, which would also start the workers, but cannot import the task's
        # file.
        multiprocessing_context="fork",
        # Otherwise the loader draws from the global generator.
        generator=torch.Generator().manual_seed(samples.seed),
    )
    with _gc_frozen_for_forks():
        batches = iter(loader)  # starts the workers
    # A failed rank may never finish this generator, so `end_loaders` must find its workers.
    _read.append(batches)
    try:
        for batch in batches:
            yield moved(batch, device)
    except Exception as error:
        raised = _explained(error, batches)
        # A garbage collector that finds this iterator in a cycle closes the queue to the processes before it
        # tells them to end, and they ignore SIGTERM.
        end_loader_processes(batches)
        if raised is error:
            raise
        raise raised from error
    finally:
        _read.remove(batches)


def _explained(error: Exception, batches: Any) -> Exception:
    """Return an error of a DataLoader's iterator in one line, or the error itself if it needs none."""
    if isinstance(error, TandemError):
        return _as_raised(error)
    problem = _why_not_sent(error, batches) if isinstance(error, RuntimeError | OSError | EOFError) else ""
    return ConfigError(problem) if problem else error


def _why_not_sent(error: Exception, batches: Any) -> str:
    """Return why a loader process could not send a batch to this one; "" for any other error."""
    if "shared memory" in str(error) and os.strerror(errno.ENOSPC) in str(error):
        size = shutil.disk_usage("/dev/shm").total
        return (
            f"/dev/shm is full ({size / 2**20:,.0f} MiB); loader processes send batches through it; use "
            "fewer --workers, or make it larger: --shm-size=1g or --ipc=host (Docker), or a volume there "
            "with medium: Memory (Kubernetes)"
        )
    if _is_out_of_files(error, batches):
        return (
            f"a batch of a loader process has too many tensors of more than {MESSAGE_BYTES // 1024} KiB: "
            f"each takes an open file, and a process may open {allow_open_files():,}; stack them in collate "
            "or raise the limit (ulimit -n)"
        )
    return ""


def _is_out_of_files(error: Exception, batches: Any) -> bool:
    """Return True if the tensors of a batch could not be opened, here or in the process that sends them."""
    # The kernel delivers none of the files that were sent, which torch reports as missing ancillary data.
    # An error of a loader process has its number only in its text.
    is_full = getattr(error, "errno", None) == errno.EMFILE or os.strerror(errno.EMFILE) in str(error)
    if is_full or str(error) == "received 0 items of ancdata":
        return True
    if not isinstance(error, EOFError | ConnectionError):
        return False
    # A sender at its limit just closes the connection, and so does one that was killed.
    most = allow_open_files() * 9 // 10
    return any(open_files(pid) > most for pid in (os.getpid(), *loader_pids(batches)))


def _as_raised(error: TandemError) -> TandemError:
    """Return an error with the message with which a loader process raised it.

    torch puts that process's traceback before it, if there is one.
    """
    text = str(error)
    if "\nOriginal " not in text:
        return error
    return type(error)(text.rstrip().rpartition("\n")[2].partition(": ")[2])


_read: list[Any] = []
"""The DataLoader iterators in use."""


def end_loaders() -> None:
    """Kill all loader processes when the rank ends, because they ignore stop signals."""
    for batches in _read:
        end_loader_processes(batches)


def _is_of_main_thread() -> bool:
    """Return True in the main thread.

    For the kernel, the parent of a process is a thread, and PR_SET_PDEATHSIG fires when that thread ends.
    """
    return threading.current_thread() is threading.main_thread()


@contextmanager
def _gc_frozen_for_forks() -> Iterator[None]:
    """Freeze existing objects, so that processes forked in this block never collect them as garbage.

    A destructor may wait for a thread, and a forked process has none of this process's threads: torch's store
    server crashes a worker that collects it.
    """
    # A caller may have frozen objects before; unfreezing would release those too.
    frozen = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


def _identity(batch: Batch) -> Batch:
    return batch


def _start_worker(rank: int, ends_with_parent: bool, files: Sequence[ReadFile], _worker: int) -> None:
    """Ignore stop signals, which reach the whole process tree: the rank needs batches until all ranks agree.

    A dataset may have opened one of the `files` of the rank, so the worker opens them for itself.
    A worker must also end immediately with its parent, the `rank`; torch checks only every five seconds.
    """
    ignore_stop_signals()
    # The signal would also come when a helper thread that made the loader ends.
    if ends_with_parent:
        end_with_parent(signal.SIGKILL)
        if os.getppid() != rank:  # the rank has just ended
            os.kill(os.getpid(), signal.SIGKILL)
    close_device_files()
    reopen(files)
    prepare_messages()


def moved(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to the device; to a GPU from pinned memory, on a stream next to the computing one."""
    if device.type != "cuda":
        return to_device(batch, device)
    side, current = _side_stream(device), torch.cuda.current_stream(device)

    def move(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor.to(device, non_blocking=True)
        with torch.cuda.stream(side):
            there = tensor.pin_memory().to(device, non_blocking=True)
        there.record_stream(current)  # its memory belongs to the side stream
        return there

    there = mapped(batch, move)
    # One wait for the whole batch: the GPU waits for the copies, the host does not.
    current.wait_stream(side)
    return there


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


PLAIN = frozenset({int, float, bool, str, bytes, NoneType, numpy.ndarray})
"""Types of values without tensors: a batch that is not collated may have thousands of them."""


def mapped(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """Return the batch with `function` applied to each tensor in nested containers."""
    if isinstance(batch, dict):
        return {
            key: value if type(value) in PLAIN else mapped(value, function) for key, value in batch.items()
        }
    if type(batch) in (list, tuple):
        return type(batch)([value if type(value) in PLAIN else mapped(value, function) for value in batch])
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, MutableMapping):  # such as UserDict, and the results of tokenizers
        filled = copy(batch)
        for key, value in batch.items():
            filled[key] = mapped(value, function)
        return filled
    if is_dataclass(batch) and not isinstance(batch, type):
        made = copy(batch)
        for each in fields(batch):
            # A frozen dataclass refuses plain assignment.
            object.__setattr__(made, each.name, mapped(getattr(batch, each.name), function))
        return made
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        # A namedtuple takes its values as separate arguments, unlike a tuple.
        return type(batch)(*(mapped(value, function) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(mapped(value, function) for value in batch)
    return batch
