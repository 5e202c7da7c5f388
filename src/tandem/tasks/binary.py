"""Logistic regression on 100 rows of 10 numbers: small enough to follow every step by hand."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tandem.data.datasets import Datasets, TensorRows
from tandem.errors import ConfigError
from tandem.tasks.classification import LossAndSums


class CountingLinear(nn.Module):
    """Rows -> one logit each [B]; its buffer counts the passes in training, so a resume can be checked."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 1)
        self.passes: Tensor
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        logits: Tensor = self.linear(rows)
        return logits.squeeze(1)


@dataclass
class Binary:
    """Rows from a normal distribution, labelled by the side of a random plane on which they lie."""

    samples: int = 100
    features: int = 10

    def __post_init__(self) -> None:
        if min(self.samples, self.features) < 1:
            raise ConfigError(
                f"--task.samples is {self.samples}, --task.features is {self.features}: give 1 or more"
            )

    def build_model(self) -> nn.Module:
        return CountingLinear(self.features)

    def build_datasets(self) -> Datasets:
        generator = torch.Generator().manual_seed(0)
        plane = torch.randn(self.features, generator=generator)

        def rows() -> TensorRows:
            inputs = torch.randn(self.samples, self.features, generator=generator)
            return TensorRows(inputs, ((inputs * plane).sum(dim=1) > 0).float())

        return Datasets(rows(), rows())

    def loss(self, model: nn.Module, batch: Any) -> LossAndSums:
        rows, targets = batch
        logits = model(rows)
        correct = ((logits > 0) == (targets > 0.5)).sum()
        mean = functional.binary_cross_entropy_with_logits(logits, targets)
        return mean, {"accuracy": (correct, torch.full_like(correct, len(targets)))}
