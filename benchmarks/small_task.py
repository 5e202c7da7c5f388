"""The task of the recovery, hang and chaos trials: short steps with batch norm, dropout and momentum."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tandem.data.datasets import Datasets, TensorRows


@dataclass
class Small:
    """`delay`: seconds that a step sleeps; `width` of the hidden layers; `samples` per epoch."""

    delay: float = 0.005
    width: int = 64
    samples: int = 24_000

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Linear(8, self.width), nn.BatchNorm1d(self.width), nn.ReLU(), nn.Dropout(0.2)),
            *(nn.Linear(self.width, self.width), nn.ReLU(), nn.Linear(self.width, 3)),
        )

    def build_datasets(self) -> Datasets:
        x = torch.randn(self.samples, 8, generator=torch.Generator().manual_seed(7))
        rows = TensorRows(x, x[:, :3].argmax(1))
        return Datasets(rows, TensorRows(x[:100], x[:100, :3].argmax(1)))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        time.sleep(self.delay)
        return nn.functional.cross_entropy(model(x), y)
