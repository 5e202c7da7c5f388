"""A task whose ranks wait for each other inside the step; one of them may be slow in its forward."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from tandem.data.datasets import Datasets

WIDTH = 16


class Block(nn.Module):
    """A layer, whose output has the mean over all ranks taken off where `shares`."""

    def __init__(self, slow: int, shares: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
        self.slow = slow
        self.shares = shares

    def forward(self, x):
        if self.training:
            time.sleep(0.02 if dist.get_rank() == self.slow else 0.004)
        x = self.layers(x)
        if self.shares and self.training:
            mean = x.detach().mean(0)
            dist.all_reduce(mean)
            x = x - mean / dist.get_world_size()
        return x


class Model(nn.Module):
    def __init__(self, slow: int, shares: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(slow, shares) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class SlowRank:
    slow: int = -1
    shares: bool = False

    def build_model(self):
        return Model(self.slow, self.shares)

    def build_datasets(self):
        x = torch.randn(2400, WIDTH, generator=torch.Generator().manual_seed(3))
        data = TensorDataset(x, x[:, :4].argmax(1))
        return Datasets(data, data)

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)
