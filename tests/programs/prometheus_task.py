import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tandem.data.datasets import Datasets, TensorRows


@dataclass
class Slow:
    delay: float = 0.02
    slow_rank: int = -1
    slow_by: float = 1.5
    knobs: str = ""  # a folder: a file `slow` there slows rank 1, `nan` breaks the loss

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))

    def build_datasets(self):
        x = torch.randn(1200, 8, generator=torch.Generator().manual_seed(7))
        rows = TensorRows(x, x[:, :3].argmax(1))
        return Datasets(rows, TensorRows(x[:96], x[:96, :3].argmax(1)))

    def loss(self, model, batch):
        x, y = batch
        loss = nn.functional.cross_entropy(model(x), y)
        if model.training:
            slow = dist.get_rank() == self.slow_rank
            if self.knobs and (Path(self.knobs) / "slow").exists():
                slow = dist.get_rank() == 1
            if self.knobs and (Path(self.knobs) / "nan").exists():
                loss = loss * float("nan")
            time.sleep(self.delay * (self.slow_by if slow else 1))
        return loss, {"accuracy": ((model(x).argmax(1) == y).sum(), len(y))}
