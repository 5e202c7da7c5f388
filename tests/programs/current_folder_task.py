import queue  # noqa: F401
import random  # noqa: F401
import tabnanny  # noqa: F401

import torch
from neighbour import WIDTH
from torch import nn

from tandem.data.datasets import Datasets, TensorRows


class Mine:
    def build_model(self):
        return nn.Linear(WIDTH, 3)

    def build_datasets(self):
        x = torch.randn(480, WIDTH)
        rows = TensorRows(x, x[:, :3].argmax(1))
        return Datasets(rows, rows)

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)
