import os
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import Dataset

from tandem.data.datasets import Datasets


class Rows(Dataset):
    def __init__(self, broken, killed, absent=-1, width=8):
        self.broken, self.killed, self.absent, self.width = broken, killed, absent, width

    def __len__(self):
        return 480

    def __getitem__(self, index):
        if index == self.broken:
            raise OSError(5, "Input/output error", "/data/100.jpg")
        if index == self.killed and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), 9)
        if index == self.absent:
            return None
        return torch.full((self.width,), float(index)), index % 2


@dataclass
class EndsLate:
    # rank 0 ends as one that has lost rank 1, which takes a second longer
    calls: int = 0

    def build_model(self):
        return nn.Linear(8, 2)

    def build_datasets(self):
        return Datasets(Rows(-1, -1), None)

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == 5 and torch.distributed.get_rank() == 0:
            os._exit(200)
        if self.calls == 5:
            time.sleep(1)
            raise ValueError("a mistake of the task")
        return nn.functional.cross_entropy(model(batch[0] / 480), batch[1])


@dataclass
class Loaded:
    broken: int = -1
    killed: int = -1
    fails_at: int = -1
    absent: int = -1
    width: int = 8
    calls: int = 0

    def build_model(self):
        return nn.Linear(self.width, 2)

    def build_datasets(self):
        return Datasets(Rows(self.broken, self.killed, self.absent, self.width), None)

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == self.fails_at:
            raise ValueError("a mistake of the task")
        return nn.functional.cross_entropy(model(batch[0] / 480), batch[1])


class ManyTensors(Loaded):
    """A batch is a list of tensors. Each large one takes an open file on its way from a loader process."""

    def collate(self, samples):
        return [x for x, _ in samples], torch.tensor([y for _, y in samples])

    def loss(self, model, batch):
        xs, y = batch
        return nn.functional.cross_entropy(model(torch.stack(xs)), y)
