"""A task with everything that makes an exact resume difficult, small enough for many trials on two cores.

It has dropout, BatchNorm, a counting buffer, and layers that are registered in another order than they are
used, so that DDP rebuilds its buckets in a new order. Samples and batches draw from all three global
generators. An epoch has 12 steps. Its fields select its own optimizer and scheduler, and rows with NaN for
`--on-nonfinite skip`.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, default_collate

from tandem.data.datasets import Datasets

SAMPLES, FEATURES, WIDTH, CLASSES = 293, 64, 384, 10


class Net(nn.Module):
    """Three layers; 200,000 parameters, enough for more than one order of summation."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.first = nn.Linear(FEATURES, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        hidden = self.dropout(functional.relu(self.norm(self.first(inputs))))
        logits: Tensor = self.head(functional.relu(self.second(hidden)))
        return logits


class NoisyRows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of numbers with new noise each time; row 7 may contain NaN."""

    def __init__(self, noise: bool, spoiled: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.labels = self.rows[:, :CLASSES].argmax(dim=1)
        self.noise = noise
        if spoiled:
            self.rows[7] = float("nan")

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.rows[index]
        if self.noise:
            row = row + 0.1 * torch.randn(FEATURES) + 0.1 * random.random() + 0.1 * numpy.random.rand()
        return row, self.labels[index]


@dataclass
class Hard:
    """See the module's docstring."""

    own: bool = False
    spoiled: bool = False

    def __post_init__(self) -> None:
        if self.own:  # tandem looks for these by name
            self.build_optimizer = _rmsprop
            self.build_scheduler = _one_cycle

    def build_model(self) -> nn.Module:
        return Net(dropout=0.2)

    def build_datasets(self) -> Datasets:
        return Datasets(NoisyRows(True, self.spoiled), NoisyRows(False, False))

    def collate(self, samples: list[Any]) -> Any:
        inputs, labels = default_collate(samples)
        return inputs * (torch.rand(inputs.shape) > 0.05), labels

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        return functional.cross_entropy(model(inputs) * (1 + 0.01 * numpy.random.rand()), labels)


def _rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)


def _one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=100)
