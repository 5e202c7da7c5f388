"""Clip gradients by their norm, and report the norm from before and the number of clipped steps."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tandem.config.slices import OptimizationConfig
from tandem.distributed.group import ProcessGroup
from tandem.distributed.strategy import Strategy


class Clipping:
    """Clip the gradients of `parameters` to a norm of `clip_norm`.

    Only `norm` and `count`, which are for log lines, wait for the device. The reported norm is from before
    clipping.
    """

    def __init__(
        self,
        optimization: OptimizationConfig,
        strategy: Strategy,
        parameters: Sequence[nn.Parameter],
        world: ProcessGroup,
    ) -> None:
        self._largest = optimization.clip_norm
        self._strategy = strategy
        self._parameters = parameters
        self._norm: Tensor | None = None
        self._clips = torch.zeros((), device=world.device)

    def begin_step(self) -> None:
        """Forget the last norm. A step that is left out is not clipped."""
        self._norm = None

    def clip(self) -> None:
        """Clip, after the gradients are unscaled and before the optimizer steps."""
        if self._largest is None:
            return
        self._norm = self._strategy.clip(self._parameters, self._largest)
        # On GPUs and under fp16, this may be a step that is left out. It does not count as clipped.
        self._clips += (self._norm > self._largest) & self._norm.isfinite()

    def norm(self) -> float | None:
        """Return the norm of the last step's gradients before clipping, or None if unknown or not finite."""
        norm = self._norm if self._largest is not None else self._strategy.norm(self._parameters)
        return float(norm) if norm is not None and math.isfinite(norm) else None

    def count(self) -> int:
        """Return the number of clipped steps since the last call."""
        clips = int(self._clips)
        self._clips.zero_()
        return clips
