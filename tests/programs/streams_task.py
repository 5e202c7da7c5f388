import random
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from tandem.data.datasets import Datasets


class Shuffled(IterableDataset):
    def __init__(self, rows):
        self.rows, self.epoch = rows, 0

    def __len__(self):
        return len(self.rows)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return Iterator(self.rows)


class Iterator:
    def __init__(self, rows):
        self.rows, self.at, self.buffer = rows, 0, []

    def __iter__(self):
        return self

    def __next__(self):
        while self.at < len(self.rows) and len(self.buffer) < 50:
            self.buffer.append(self.rows[self.at] * (1 + 0.1 * torch.randn(())))
            self.at += 1
        if not self.buffer:
            raise StopIteration
        row = self.buffer.pop(random.randrange(len(self.buffer)))
        return row, row[:3].argmax()


class Telling(Iterator):
    def state_dict(self):
        return {"at": self.at, "buffer": self.buffer}

    def load_state_dict(self, state):
        self.at, self.buffer = state["at"], list(state["buffer"])


class ShuffledTelling(Shuffled):
    def __iter__(self):
        return Telling(self.rows)


@dataclass
class Small:
    plain: bool = False
    delay: float = 0.0

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 3))

    def build_datasets(self):
        x = torch.randn(1300, 8, generator=torch.Generator().manual_seed(7))
        stream = Shuffled(x) if self.plain else ShuffledTelling(x)
        return Datasets(stream, TensorDataset(x[:101], x[:101, :3].argmax(1)))

    def loss(self, model, batch):
        x, y = batch
        time.sleep(self.delay if model.training else 0)
        out = model(x)
        return nn.functional.cross_entropy(out, y), {"accuracy": ((out.argmax(1) == y).sum(), len(y))}
