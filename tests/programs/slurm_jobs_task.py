import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tandem.data.datasets import Datasets, TensorRows


@dataclass
class Held:
    def build_model(self):
        return nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3)
        )

    def build_datasets(self):
        x = torch.randn(2400, 8, generator=torch.Generator().manual_seed(7))
        rows = TensorRows(x, x[:, :3].argmax(1))
        return Datasets(rows, rows)

    def loss(self, model, batch):
        x, y = batch
        time.sleep(0.3 if model.training and Path("hold").exists() else 0)
        return nn.functional.cross_entropy(model(x), y)
