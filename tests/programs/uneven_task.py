import torch
from torch import nn

from tandem.data.datasets import Datasets

SIZES = (41, 13)


class Files:
    def of_rank(self, rank, world_size):
        generator = torch.Generator().manual_seed(rank)
        for _ in range(SIZES[rank]):
            row = torch.randn(4, generator=generator)
            yield row, row.sum(0, keepdim=True)


class Line:
    def build_model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def build_datasets(self):
        return Datasets(Files(), Files())

    def loss(self, model, batch):
        rows, targets = batch
        error = (model(rows) - targets).square()
        return error.mean(), {"error": (error.sum(), len(rows))}
