"""BatchNorm's running statistics under `--dist-bn reduce`: every rank keeps its own, and their mean counts.

Training never reads them, so each rank's go on as if nothing were exchanged; an evaluation and a save take
the mean over ranks. A checkpoint holds that mean with the model, and besides every rank's own: resumed with
as many ranks, a run goes on with the same bits whenever it was stopped; another number of ranks goes on from
the mean. `--dist-bn broadcast` needs nothing of this: rank 0's count, and go to all ranks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tandem.distributed.batchnorm import SynchronisedBatchNorm
from tandem.distributed.group import ProcessGroup
from tandem.torch_private import is_batchnorm

SYNCHRONISED = (nn.SyncBatchNorm, SynchronisedBatchNorm)


class Statistics:
    """Those of one model; all ranks call each method at the same point, unless it says otherwise."""

    def __init__(self, group: ProcessGroup, model: nn.Module) -> None:
        self._group, self._model = group, model

    @classmethod
    def of(cls, how: str, group: ProcessGroup, model: nn.Module) -> "Statistics | None":
        """What `--dist-bn` asks for; None where ranks have no statistics of their own, or rank 0's count."""
        found = cls(group, model)
        return found if how == "reduce" and group.size > 1 and found._own() else None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """The means in the place of this rank's own, and rank 0's other buffers; its own again afterwards."""
        own = self._own()
        before = {name: buffer.clone() for name, buffer in own.items()}
        mine = {id(buffer) for buffer in own.values()}
        for buffer in self._model.buffers():
            if id(buffer) not in mine:
                dist.broadcast(buffer, src=0)
        _put(own, _means(self._of_ranks()))
        try:
            yield
        finally:
            _put(own, before)

    def whole(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The model's `state` with the means in it."""
        return {**state, **_means(self._of_ranks())}

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds besides: of each statistic one row per rank."""
        return self._of_ranks()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """This rank's own of what `state` gave, if as many ranks gave it. Exchanges nothing."""
        own = self._own()
        if {name: (self._group.size, *b.shape) for name, b in own.items()} == {
            name: tuple(rows.shape) for name, rows in state.items()
        }:
            _put(own, {name: rows[self._group.rank] for name, rows in state.items()})

    def _own(self) -> dict[str, Tensor]:
        """Running means and variances of layers that are not synchronised, by their names in the state."""
        layers = self._model.named_modules()
        own = [(p, each) for p, each in layers if is_batchnorm(each) and not isinstance(each, SYNCHRONISED)]
        return {
            name: buffer
            for prefix, layer in own
            for name, buffer in layer.named_buffers(prefix, recurse=False)
            if buffer.is_floating_point()
        }

    def _of_ranks(self) -> dict[str, Tensor]:
        own = self._own()
        mine = torch.cat([buffer.detach().double().reshape(-1) for buffer in own.values()])
        rows = mine.new_empty(self._group.size * len(mine))
        dist.all_gather_into_tensor(rows, mine)
        parts = torch.split(rows.view(self._group.size, -1), [b.numel() for b in own.values()], dim=1)
        return {
            name: part.reshape(-1, *buffer.shape).to(buffer.dtype)
            for (name, buffer), part in zip(own.items(), parts, strict=True)
        }


def _means(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.double().mean(dim=0).to(each.dtype) for name, each in rows.items()}


@torch.no_grad()
def _put(buffers: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        buffer.copy_(values[name])
