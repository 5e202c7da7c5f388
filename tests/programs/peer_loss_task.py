import torch
from torch import nn

from tandem.data.datasets import Datasets, TensorRows


class Forgetful:
    def build_model(self):
        return nn.Linear(2, 1)

    def build_datasets(self):
        rows = TensorRows(torch.ones(8, 2), torch.ones(8))
        return Datasets(rows, rows)

    def loss(self, model, batch):
        raise RuntimeError("cannot restore the vocabulary")
