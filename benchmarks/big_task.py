"""The task of benchmarks/big_resume.py: a large state, and little to compute."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tandem.data.datasets import Datasets, TensorRows

WIDTH = 1024
BYTES_OF_A_ROW = 4 * WIDTH


class Tables(nn.Module):
    """Two tables with rows of 1,024 numbers: `kept` is never trained; `trained` has Adam's two moments."""

    def __init__(self, kept: int, trained: int) -> None:
        super().__init__()
        rows = {"kept": kept // 8, "trained": trained // 8}
        tables = {name: [torch.ones(count, WIDTH) for _ in range(8)] for name, count in rows.items()}
        self.kept = nn.ParameterList([nn.Parameter(each, requires_grad=False) for each in tables["kept"]])
        self.trained = nn.ParameterList(tables["trained"])

    def forward(self, rows: Tensor) -> Tensor:
        return torch.stack([(each[:1] * rows).sum(1) for each in (*self.kept, *self.trained)], dim=1)


@dataclass
class Big:
    """A state of `gigabytes`: 0.45 of it are Adam's parameters and moments, the rest are fixed weights."""

    gigabytes: float = 10.0

    def build_model(self) -> nn.Module:
        rows = self.gigabytes * 1e9 / BYTES_OF_A_ROW
        return Tables(int(rows * 0.55), int(rows * 0.45 / 3))

    def build_datasets(self) -> Datasets:
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(7))
        return Datasets(TensorRows(x, torch.zeros(64, dtype=torch.long)), None)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.Adam(trained, lr=1e-6, foreach=False)  # for each: with a copy of all

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)
