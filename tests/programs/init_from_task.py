import torch
from torch import nn

from tandem.data.datasets import Datasets, TensorRows


class Layers:
    def build_model(self):
        return nn.Sequential(nn.Linear(4, 33), nn.ReLU(), nn.Linear(33, 2))

    def build_datasets(self):
        rows = TensorRows(torch.ones(48, 4), torch.ones(48, 2))
        return Datasets(rows, rows)

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])
