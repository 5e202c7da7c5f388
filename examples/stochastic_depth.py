"""Blocks that are left out by chance in each step, others on each rank: DDP needs `--find-unused`.

    tandem launch --nodes 2 --task examples/stochastic_depth.py:StochasticDepth --find-unused --batch-size 120
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tandem import Datasets


class Blocks(nn.Module):
    def __init__(self, width, count, kept):
        super().__init__()
        self.first, self.last, self.kept = nn.Linear(10, width), nn.Linear(width, 3), kept
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if not self.training or torch.rand(()) < self.kept:  # seeded for each step and rank
                x = x + block(x).relu() * (1.0 if self.training else self.kept)
        return self.last(x)


class StochasticDepth:
    def build_model(self):
        return Blocks(width=32, count=4, kept=0.7)

    def build_datasets(self):
        x = torch.randn(7_200, 10, generator=torch.Generator().manual_seed(0))
        y = (x[:, :9].unflatten(1, (3, 3)) ** 2).sum(2).argmax(1)
        return Datasets(TensorDataset(x[:6_000], y[:6_000]), TensorDataset(x[6_000:], y[6_000:]))

    def loss(self, model, batch):
        x, y = batch
        out = model(x)
        return nn.functional.cross_entropy(out, y), {"accuracy": ((out.argmax(1) == y).sum(), len(y))}
