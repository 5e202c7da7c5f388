import os
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import Dataset

from tandem.data.datasets import Datasets


class Rows(Dataset):
    def __init__(self, broken, killed):
        self.broken, self.killed = broken, killed

    def __len__(self):
        return 480

    def __getitem__(self, index):
        if index == self.broken:
            raise OSError(5, "Input/output error", "/data/100.jpg")
        if index == self.killed and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), 9)
        return torch.full((8,), float(index)), index % 2


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
    calls: int = 0

    def build_model(self):
        return nn.Linear(8, 2)

    def build_datasets(self):
        return Datasets(Rows(self.broken, self.killed), None)

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == self.fails_at:
            raise ValueError("a mistake of the task")
        return nn.functional.cross_entropy(model(batch[0] / 480), batch[1])
