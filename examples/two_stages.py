"""A model in two stages on two devices of one process, trained by DDP: `--devices-per-rank 2`.

    tandem launch --nproc 2 --devices-per-rank 2 --task examples/two_stages.py:TwoStages

Each rank has two GPUs of its own (rank 0 the first two), and on a machine without any the CPU twice. The
batch, the loss and its sums are on the first of them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tandem.data.datasets import Datasets, TensorRows


class Stages(nn.Module):
    """Each stage runs where it lies; what it gives is handed on to where the next one is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, width), nn.ReLU())
        self.second = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.to(self.first[0].weight.device))
        out: Tensor = self.second(hidden.to(self.second.weight.device))
        return out


@dataclass
class TwoStages:
    width: int = 64

    def build_model(self) -> nn.Module:
        return Stages(self.width)

    def place(self, model: nn.Module, first: torch.device, second: torch.device) -> None:
        model.first.to(first)
        model.second.to(second)

    def build_datasets(self) -> Datasets:
        x = torch.randn(2400, 8, generator=torch.Generator().manual_seed(7))
        rows = TensorRows(x, x[:, :3].argmax(1))
        return Datasets(rows, TensorRows(x[:240], x[:240, :3].argmax(1)))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, tuple[Any, Any]]]:
        x, y = batch
        out = model(x)
        y = y.to(out.device)
        right = (out.argmax(dim=1) == y).sum()
        return nn.functional.cross_entropy(out, y), {"accuracy": (right, len(y))}
