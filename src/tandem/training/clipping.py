"""Gradients clipped by their norm, the norm that they had, and how often that was."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tandem.config.slices import OptimisationConfig
from tandem.distributed.group import ProcessGroup
from tandem.distributed.strategy import Strategy


class Clipping:
    """Clips the gradients of `parameters` to a norm of `clip_norm`.

    Nothing in here waits for the device but `norm` and `count`, which are for a line of the log. The norm is
    of the gradients as they were before.
    """

    def __init__(
        self,
        optimization: OptimisationConfig,
        strategy: Strategy,
        parameters: Sequence[nn.Parameter],
        world: ProcessGroup,
    ) -> None:
        self._largest = optimization.clip_norm
        self._strategy, self._parameters = strategy, parameters
        self._norm: Tensor | None = None
        self._clips = torch.zeros((), device=world.device)

    def begin_step(self) -> None:
        """From here on nothing is known of the gradients: a step that is left out is not clipped."""
        self._norm = None

    def clip(self) -> None:
        """After the gradients are unscaled, before the optimizer."""
        if self._largest is None:
            return
        self._norm = self._strategy.clip(self._parameters, self._largest)
        # On GPUs, and under fp16, the step may be one that is left out.
        self._clips += (self._norm > self._largest) & self._norm.isfinite()

    def norm(self) -> float | None:
        """Of the last step's gradients, before they were clipped; None: not finite, or not known."""
        norm = self._norm if self._largest is not None else self._strategy.norm(self._parameters)
        return float(norm) if norm is not None and math.isfinite(norm) else None

    def count(self) -> int:
        """Steps that were clipped since the last call."""
        clips = int(self._clips)
        self._clips.zero_()
        return clips
