"""Gradients clipped by their norm or element by element, the norm that they had, and how often that was."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tandem.config.slices import OptimisationConfig
from tandem.distributed.group import ProcessGroup
from tandem.distributed.strategy import Strategy
from tandem.training.nonfinite import gradients_by_type


class Clipping:
    """Clips the gradients of `parameters` to a norm of `clip_norm`, then each element to `clip_value`.

    Nothing in here waits for the device but `norm` and `count`, which are for a line of the log. Either limit
    has the norm computed in each step: it is of the gradients as they were.
    """

    def __init__(
        self,
        optimization: OptimisationConfig,
        strategy: Strategy,
        parameters: Sequence[nn.Parameter],
        world: ProcessGroup,
    ) -> None:
        self._largest, self._value = optimization.clip_norm, optimization.clip_value
        self._is_on = self._largest is not None or self._value is not None
        self._strategy, self._parameters, self._world = strategy, parameters, world
        self._norm: Tensor | None = None
        self._clips = torch.zeros((), device=world.device)

    def begin_step(self) -> None:
        """From here on nothing is known of the gradients: a step that is left out is not clipped."""
        self._norm = None

    def clip(self) -> None:
        """After the gradients are unscaled, before the optimizer."""
        if not self._is_on:
            return
        clipped = torch.zeros_like(self._clips, dtype=torch.bool)
        if self._largest is not None:
            self._norm = self._strategy.clip(self._parameters, self._largest)
            clipped |= self._norm > self._largest
        else:
            self._norm = self._strategy.norm(self._parameters)
        if self._value is not None:
            clipped |= self._clamp(self._value)
        # On GPUs, and under fp16, the step may be one that is left out.
        self._clips += clipped & self._norm.isfinite()

    def _clamp(self, value: float) -> Tensor:
        """Whether an element on any rank was beyond `value`. Shares are clamped as wholes are."""
        largest = torch.zeros_like(self._clips)
        for group in gradients_by_type(self._parameters, self._strategy):
            gradients = [each for each in group if each.numel()]  # of a small one some ranks have no share
            largest = torch.maximum(largest, nn.utils.get_total_norm(gradients, math.inf).to(largest))
            for gradient in gradients:
                gradient.clamp_(-value, value)
        beyond = (largest > value).to(largest)
        return (self._world.mean(beyond) if self._strategy.shares_parameters else beyond) > 0

    def norm(self) -> float | None:
        """Of the last step's gradients, before they were clipped; None: not finite, or not known."""
        norm = self._norm if self._is_on else self._strategy.norm(self._parameters)
        return float(norm) if norm is not None and math.isfinite(norm) else None

    def count(self) -> int:
        """Steps that were clipped since the last call."""
        clips = int(self._clips)
        self._clips.zero_()
        return clips
