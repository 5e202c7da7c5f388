"""A model with many parameters and little to compute, so that a step is nearly only the gradient exchange."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tandem.data.datasets import Datasets, TensorRows


@dataclass
class Wide:
    """`width` squared parameters in float32, 4 bytes each on the wire."""

    width: int = 1400

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, self.width), nn.ReLU(), nn.Linear(self.width, self.width))

    def build_datasets(self) -> Datasets:
        x = torch.randn(2400, 8, generator=torch.Generator().manual_seed(7))
        rows = TensorRows(x, x[:, :3].argmax(1))
        return Datasets(rows, TensorRows(x[:24], x[:24, :3].argmax(1)))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)
