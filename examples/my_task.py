"""Your own model: tandem launch --task examples/my_task.py:MyTask --task.width 64"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tandem import Datasets


@dataclass
class MyTask:
    width: int = 32

    def build_model(self):
        return nn.Sequential(nn.Linear(2, self.width), nn.Tanh(), nn.Linear(self.width, 1))

    def build_datasets(self):
        x = torch.rand(6_000, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
        y = torch.sin(2 * x[:, :1]) + x[:, 1:] ** 2
        return Datasets(TensorDataset(x[:4_800], y[:4_800]), TensorDataset(x[4_800:], y[4_800:]))

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])
