"""Restore a model's buffers after a step that must change nothing, and fit buffers to a checkpoint.

A forward pass may create, grow, replace or retype buffers, as caches of attention masks and rotary embeddings
do. A buffer is therefore identified by its module and name.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from tandem.data.kinds import can_be_read_again, evaluation_batches
from tandem.distributed.group import ProcessGroup
from tandem.tasks.base import TaskWithDefaults
from tandem.tasks.mistakes import check_batch, mistake
from tandem.torch_private import copy_all, is_batchnorm

log = logging.getLogger("tandem.run")

BufferOwner = tuple[nn.Module, str]


class KeptBuffers:
    """Copies of all buffers of `modules()`.

    Buffers of one dtype and device share one tensor, so a step needs a few kernels, not a few per buffer.
    """

    def __init__(self, modules: Callable[[], Iterable[nn.Module]]) -> None:
        self._modules = modules
        self._empty: list[BufferOwner] = []  # registered without a tensor
        self._kept: list[tuple[list[BufferOwner], list[torch.Size], Tensor]] = []

    def keep(self) -> None:
        """Copy the buffers as they are now."""
        groups: dict[tuple[torch.dtype, torch.device], list[tuple[BufferOwner, Tensor]]] = {}
        self._empty = []
        for owner, buffer in self._live():
            if buffer is None:
                self._empty.append(owner)
            else:
                groups.setdefault((buffer.dtype, buffer.device), []).append((owner, buffer))
        self._kept = [
            ([owner for owner, _ in group], [b.shape for _, b in group], _flat([b for _, b in group]))
            for group in groups.values()
        ]

    def put_back(self, found: Tensor | None = None) -> None:
        """Restore the buffers; with `found` (a scalar on a device), only if it is above 0.

        The host does not wait for `found` unless a buffer's shape or dtype has changed.
        """
        new = {owner for owner, buffer in self._live() if buffer is not None}
        replaced: list[tuple[BufferOwner, Tensor]] = []
        for owners, shapes, flat in self._kept:
            parts = torch.split(flat, [shape.numel() for shape in shapes])
            before = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
            pairs = [
                (owner, old, owner[0]._buffers.get(owner[1]))
                for owner, old in zip(owners, before, strict=True)
            ]
            new.difference_update(owners)
            replaced += [(owner, old) for owner, old, now in pairs if not _is_alike(old, now)]
            # Values are copied into the same tensors, because DDP and CUDA graphs refer to them.
            alike = [(now, old) for _, old, now in pairs if now is not None and _is_alike(old, now)]
            _copy_where(found, alike)
        if (new or replaced) and (found is None or bool(found)):
            for (module, name), old in replaced:
                # `old` is a view, which would keep the copies of all buffers in memory.
                module._buffers[name] = old.clone()
            for module, name in new.intersection(self._empty):
                module._buffers[name] = None
            for module, name in new.difference(self._empty):
                del module._buffers[name]

    def _live(self) -> Iterator[tuple[BufferOwner, Tensor | None]]:
        for module in self._modules():
            for name, buffer in module._buffers.items():
                yield (module, name), buffer


def has_saved_buffers(model: nn.Module) -> bool:
    """Return whether a state_dict may have more than parameters, now or after a forward pass."""
    plain = nn.Module.get_extra_state
    return any(
        module._buffers.keys() - module._non_persistent_buffers_set
        or type(module).get_extra_state is not plain
        for module in model.modules()
    )


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers (running statistics) at the end of the block."""
    kept = KeptBuffers(model.modules)
    kept.keep()
    try:
        yield
    finally:
        kept.put_back()


def adopt_buffers(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Give the model's buffers the shapes of a saved state, if a forward pass had changed them.

    BatchNorm's buffers are left alone, because their shapes show which model it is.
    """
    modules = dict(model.named_modules())
    for key, value in saved.items():
        owner, _, name = key.rpartition(".")
        module = modules.get(owner)
        is_fixed = module is None or is_batchnorm(module) or isinstance(module, LazyModuleMixin)
        if module is None or is_fixed or not isinstance(value, Tensor):
            continue
        # A name that a parameter or submodule has cannot be a buffer's.
        is_free = name in module._buffers or not hasattr(module, name)
        if is_free and not _is_alike(value, module._buffers.get(name), any_device=True):
            device = next((p.device for p in (*module.parameters(), *model.parameters())), value.device)
            module._buffers[name] = torch.empty_like(value, device=device)
            log.info(
                "%s takes the shape %s from the checkpoint (the buffer was resized in a forward pass)",
                key,
                tuple(value.shape),
            )


def _is_alike(old: Tensor, now: Tensor | None, any_device: bool = False) -> bool:
    if now is None or old.shape != now.shape or old.dtype != now.dtype:
        return False
    return any_device or old.device == now.device


@torch.no_grad()
def _copy_where(found: Tensor | None, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy old values into buffers, for pairs (buffer, old values); with `found`, only if it is above 0."""
    if not pairs:
        return
    group = [now for now, _ in pairs]
    before = [old for _, old in pairs]
    # Select element by element, so that the copy depends on a value on the device without a wait for it.
    if found is not None:
        flat = torch.where(found.to(group[0].device) > 0, _flat(before), _flat(group))
        parts = torch.split(flat, [buffer.numel() for buffer in group])
        before = [part.view(buffer.shape) for part, buffer in zip(parts, group, strict=True)]
    copy_all(group, before)


def _flat(group: list[Tensor]) -> Tensor:
    return torch.cat([buffer.detach().reshape(-1) for buffer in group])


# Initialize lazy modules (nn.LazyLinear), whose parameters get their shapes from the first batch.

SAMPLES = 2
"""Number of samples of the training set. BatchNorm needs two."""


def is_lazy(value: Any) -> bool:
    """Return whether a parameter or buffer has no shape yet."""
    return isinstance(value, nn.UninitializedParameter | nn.UninitializedBuffer)


def materialize(task: TaskWithDefaults, model: nn.Module, train: Any, world: ProcessGroup) -> None:
    """Give each lazy parameter its shape and initial values, by a forward pass of a few samples.

    The pass is in evaluation mode, so neither dropout nor running statistics depend on it, and the weights
    are the same with any number of ranks. Raises ConfigError if no batch can be read in advance, or if none
    reaches a module.
    """
    if not _without_shape(model):
        return
    if not can_be_read_again(train, world.rank, world.size):
        got = "a lazy module, but the data can be read only once"
        raise mistake(task.build_model, got, "set the module's sizes explicitly, as in nn.Linear(in, out)")
    part = (world.rank, world.size) if hasattr(train, "of_rank") else (0, 1)
    batches = evaluation_batches(train, *part, SAMPLES, collate=task.collate, device=world.device)
    batch = next(batches, None)
    if batch is not None:
        check_batch(task.collate, task.build_datasets, batch)
        was_training = model.training
        model.eval()
        with torch.no_grad():
            task.loss(model, batch)
        model.train(was_training)
    if names := _without_shape(model):
        got = f"a lazy module that the first batch does not reach ({names[0]})"
        raise mistake(task.build_model, got, "set the module's sizes explicitly, as in nn.Linear(in, out)")


def _without_shape(model: nn.Module) -> list[str]:
    named: Iterator[tuple[str, Any]] = iter([*model.named_parameters(), *model.named_buffers()])
    return [name for name, value in named if is_lazy(value)]
