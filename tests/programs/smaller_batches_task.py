import os
import time
from dataclasses import dataclass

import torch
from torch import nn

from tandem.data.datasets import Datasets, TensorRows


def allocate():
    torch.empty(2**60, dtype=torch.uint8)  # more than any allocator has


@dataclass
class Small:
    """Of `rank`, a forward or backward pass of more than `most` samples fails, after `calls` passes.

    SHORT is "WHERE RANK MOST CALLS"; without it, memory is unlimited. DELAY is not in the fingerprint.
    """

    delay: float = 0.0

    def __post_init__(self):
        self.pause = float(os.environ.get("DELAY", "0"))
        where, *numbers = os.environ.get("SHORT", "nowhere 0 0 0").split()
        self.where = where
        self.rank, self.most, self.after = map(int, numbers)
        self.calls = 0

    def build_model(self):
        return nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3)
        )

    def build_datasets(self):
        x = torch.randn(2500, 8, generator=torch.Generator().manual_seed(7))
        rows = TensorRows(x, x[:, :3].argmax(1))
        return Datasets(rows, TensorRows(x[:60], x[:60, :3].argmax(1)))

    def loss(self, model, batch):
        x, y = batch
        time.sleep(self.pause if model.training else 0)
        out = model(x)
        self.calls += model.training
        is_short = self.calls > self.after and len(x) > self.most and self.rank == own_rank()
        if is_short and self.where == ("forward" if model.training else "evaluation"):
            allocate()
        if is_short and self.where == "backward" and model.training:
            out.register_hook(lambda grad: allocate())
        return nn.functional.cross_entropy(out, y)


def own_rank():
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
