import os
import time

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset

from tandem.data.datasets import Datasets, TensorRows

ROWS = TensorRows(torch.ones(480, 4), torch.ones(480, 1))


class Right:
    def build_model(self):
        return nn.Linear(4, 1)

    def build_datasets(self):
        return Datasets(ROWS, ROWS)

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])


class Entropic(Dataset):
    def __len__(self):
        return 480

    def __getitem__(self, index):
        return torch.full((4,), float(os.urandom(1)[0])), torch.ones(1)


class SamplesOfEntropy(Right):
    def build_datasets(self):
        return Datasets(Entropic(), ROWS)


class WeightsOfTime(Right):
    def build_model(self):
        model = nn.Linear(4, 1)
        model.bias.data.fill_(time.time_ns() % 1_000_003)
        return model


class LossThatCounts(Right):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        return nn.functional.mse_loss(model(batch[0]), batch[1]) * self.calls


class UnseededRows(Right):
    def build_datasets(self):
        x = torch.from_numpy(numpy.random.default_rng().random((480, 4))).float()
        return Datasets(TensorRows(x, torch.ones(480, 1)), ROWS)


class Lambda(Right):
    def build_datasets(self):
        rows = TensorRows(torch.ones(480, 4), torch.ones(480, 1))
        rows.transform = lambda sample: sample  # type: ignore[attr-defined]
        return Datasets(rows, ROWS)
