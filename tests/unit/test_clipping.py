"""What a line of the log says of clipped gradients, also where a step was left out."""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tandem.config.slices import OptimizationConfig
from tandem.training.optim import Clipping

STRATEGY: Any = SimpleNamespace(
    clip=nn.utils.clip_grad_norm_,
    norm=lambda parameters: torch.nn.utils.get_total_norm([p.grad for p in parameters]),
    local=lambda tensor: tensor,
    shards_parameters=False,
)


WORLD: Any = SimpleNamespace(device=torch.device("cpu"))


def clipping(largest: float | None) -> tuple[Clipping, nn.Parameter]:
    weight = nn.Parameter(torch.zeros(2))
    optimization = OptimizationConfig(clip_norm=largest)
    return Clipping(optimization, STRATEGY, [weight], WORLD), weight


def test_clips_are_counted_and_the_norm_is_that_from_before() -> None:
    clips, weight = clipping(1.0)
    for gradient in ([3.0, 4.0], [0.3, 0.4], [6.0, 8.0]):
        clips.begin_step()
        weight.grad = torch.tensor(gradient)
        clips.clip()
    assert weight.grad is not None and math.isclose(float(weight.grad.norm()), 1.0, rel_tol=1e-5)
    assert (clips.norm(), clips.count(), clips.count()) == (10.0, 2, 0)


def test_without_a_limit_the_norm_is_known_all_the_same() -> None:
    clips, weight = clipping(None)
    weight.grad = torch.tensor([3.0, 4.0])
    clips.clip()
    assert (clips.norm(), clips.count(), weight.grad.tolist()) == (5.0, 0, [3.0, 4.0])


def test_a_step_that_is_left_out_is_not_clipped_and_has_no_older_steps_norm() -> None:
    """On GPUs, and under fp16, it comes by here; on CPUs it does not."""
    clips, weight = clipping(1.0)
    weight.grad = torch.tensor([0.3, 0.4])
    clips.clip()
    clips.begin_step()
    assert clips.norm() is None, "of the step before"
    weight.grad = torch.tensor([math.inf, 1.0])
    clips.clip()
    assert (clips.norm(), clips.count()) == (None, 0)
