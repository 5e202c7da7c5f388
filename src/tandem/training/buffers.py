"""A model's buffers before a step, to be put back where the step must change nothing.

Those of one type and device are kept in one piece: some kernels a step, not some for each buffer.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tandem.torch_private import copy_all


class KeptBuffers:
    """Copies of the buffers that `live()` gives; a forward pass may put others in their places."""

    def __init__(self, live: Callable[[], Iterable[Tensor]]) -> None:
        self._live = live
        self._kept: list[tuple[list[int], Tensor]] = []  # (places of one type and device, their values)

    def keep(self) -> None:
        """Remember them as they are now."""
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        buffers = list(self._live())
        for place, buffer in enumerate(buffers):
            groups.setdefault((buffer.dtype, buffer.device), []).append(place)
        self._kept = [(places, _flat([buffers[each] for each in places])) for places in groups.values()]

    def put_back(self, found: Tensor | None = None) -> None:
        """As they were; with `found`, a scalar on a device, where it is above 0: nobody waits to know it."""
        buffers = list(self._live())
        for places, before in self._kept:
            group = [buffers[place] for place in places]
            flat = before if found is None else torch.where(found.to(before.device) > 0, before, _flat(group))
            parts = torch.split(flat, [buffer.numel() for buffer in group])
            copy_all(group, [part.view(buffer.shape) for part, buffer in zip(parts, group, strict=True)])


def _flat(group: list[Tensor]) -> Tensor:
    return torch.cat([buffer.detach().reshape(-1) for buffer in group])
