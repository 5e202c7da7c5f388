from dataclasses import dataclass

import torch
from torch import nn

from tandem.data.datasets import Datasets, TensorRows


@dataclass
class Small:
    width: int = 8

    def build_model(self):
        return nn.Sequential(
            nn.Linear(8, self.width), nn.BatchNorm1d(self.width), nn.ReLU(), nn.Linear(self.width, 3)
        )

    def build_datasets(self):
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(240, 8, generator=generator)
        rows = TensorRows(x, x[:, :3].argmax(1))
        return Datasets(rows, TensorRows(x[:101], x[:101, :3].argmax(1)))

    def loss(self, model, batch):
        x, y = batch
        out = model(x)
        return nn.functional.cross_entropy(out, y), {"accuracy": ((out.argmax(1) == y).sum(), len(y))}


class Apart(Small):
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model[3](model[2](model[1](model[0](batch[0])))), batch[1])


class Broken(Small):
    def evaluate_batch(self, model, batch):
        raise RuntimeError("this evaluation is broken")


class Unpooled(Small):
    def evaluate_batch(self, model, batch):
        """Has no deterministic kernel on any device."""
        pooled, at = nn.functional.max_pool1d(batch[0].unsqueeze(0), 2, return_indices=True)
        nn.functional.max_unpool1d(pooled, at, [2])
        return {"accuracy": (1.0, 1)}
