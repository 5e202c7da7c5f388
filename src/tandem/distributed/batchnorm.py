"""Compute BatchNorm over the global batch on CPUs, where torch's SyncBatchNorm has no kernel.

    from tandem.distributed.batchnorm import synchronized
    model = synchronized(model)         before DDP wraps it; all ranks then run the same forward passes

Each layer needs one all-reduce in the forward pass (count, sum and sum of squares per channel) and one in the
backward pass: 4.6 kB each for 288 channels, and all ranks wait for each other in both. Counts are exchanged
as well, so ranks may have shares of different sizes, or none. Sums are exchanged in float64, in which the
cancellation between the sum of squares and the square of the sum does no harm.
"""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

log = logging.getLogger("tandem.run")

BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SynchronizedBatchNorm(nn.BatchNorm1d):
    """A BatchNorm of any dimension; outside of training, an ordinary BatchNorm without communication.

    It is not a subclass of nn.SyncBatchNorm, because DDP rejects a CPU model that contains one.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input` [N, C, ...] with any N, including 0.

        Raises ValueError if there is only one value per channel over all ranks.
        """
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if not self.training:
            # Without running statistics (track_running_stats=False), torch evaluates with the batch's
            # statistics.
            uses_batch = self.running_mean is None
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, uses_batch, 0.0, self.eps
            )
        normalized, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps)
        if self.track_running_stats and self.running_mean is not None:
            self._track(mean, variance, count)
        assert isinstance(normalized, Tensor)
        return normalized

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: float) -> None:
        """Update the running statistics; like torch, they keep the unbiased variance."""
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked.add_(1)
        # In torch, momentum=None means a cumulative average.
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.mul_(1 - share).add_(new.to(running.dtype), alpha=share)


def synchronized(model: nn.Module) -> nn.Module:
    """Synchronize every BatchNorm in `model`, in place.

    The class of a layer is replaced, not the layer object: its hooks, the modules that share it and
    references to it remain valid. A layer with its own forward() is not changed, and is reported in the log.
    """
    left = set()
    for layer in model.modules():
        if not isinstance(layer, BATCHNORMS) or isinstance(layer, SynchronizedBatchNorm):
            continue
        # All three BatchNorm classes inherit this forward from torch's _BatchNorm.
        if type(layer).forward is not nn.BatchNorm1d.forward:
            left.add(type(layer).__name__)
            continue
        layer.__class__ = SynchronizedBatchNorm
    if left:
        log.warning(
            "--sync-batchnorm does not convert %s, because it has its own forward()", ", ".join(sorted(left))
        )
    return model


class _Normalize(torch.autograd.Function):
    """Returns the normalized input and, over all ranks, mean, biased variance and count per channel."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        values = _wide(input)
        here = values.numel() // max(1, values.size(1))
        channels = values.size(1)
        sums = torch.zeros(2 * channels + 1, dtype=torch.float64)
        # The var_mean of an empty share would be NaN.
        if here:
            variance, mean = (
                t.double() for t in torch.var_mean(values, _all_but_channels(values), correction=0)
            )
            sums = torch.cat([mean * here, (variance + mean * mean) * here, sums.new_tensor([here])])
        # A rank without samples takes part too, or the others would wait for it.
        dist.all_reduce(sums)
        count = float(sums[-1])
        # The count is a sum over ranks, so all of them raise here or none does. The unbiased variance would
        # divide by zero.
        if count < 2:
            raise ValueError(
                f"expected more than 1 value per channel when training, got {tuple(input.shape)}"
            )
        mean = sums[:channels] / count
        # Rounding can make the difference slightly negative.
        variance = (sums[channels:-1] / count - mean * mean).clamp_(min=0.0)
        mean = mean.to(values.dtype)
        variance = variance.to(values.dtype)
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(variance + eps))
        ctx.count = count
        ctx.mark_non_differentiable(mean, variance)
        weight, bias = (each if each is None else each.to(values.dtype) for each in (weight, bias))
        # Training mode would use the statistics of this rank's share instead of these.
        normalized = functional.batch_norm(values, mean, variance, weight, bias, False, 0.0, eps)
        return normalized.to(input.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor, *_: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Return the gradients.

        Those of weight and bias are sums over this rank's samples, which DDP averages.
        """
        input, weight, mean, scale = ctx.saved_tensors
        values = _wide(input)
        gradient = _wide(gradient)
        shape = [1, -1] + [1] * (values.dim() - 2)
        centered = (values - mean.view(shape)) * scale.view(shape)
        dims = _all_but_channels(values)
        of_bias = gradient.sum(dims)
        of_weight = (gradient * centered).sum(dims)
        of_input = None
        # All ranks have the same layers, so either all of them skip this all-reduce or none does.
        if ctx.needs_input_grad[0]:
            sums = torch.cat([of_bias, of_weight]).double()
            dist.all_reduce(sums)
            means = (sums / ctx.count).to(values.dtype)
            of_means, of_scales = (each.view(shape) for each in means.chunk(2))
            factor = scale if weight is None else scale * weight
            of_input = (gradient - of_means - centered * of_scales) * factor.view(shape)
            of_input = of_input.to(input.dtype)
        has_weight, has_bias = ctx.needs_input_grad[1:3]
        return of_input, of_weight if has_weight else None, of_bias if has_bias else None, None


def _all_but_channels(values: Tensor) -> list[int]:
    return [0, *range(2, values.dim())]


def _wide(values: Tensor) -> Tensor:
    """Convert to at least float32: autocast passes bf16 or fp16, whose sums would be inaccurate."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
