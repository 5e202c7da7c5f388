import json
import os

import torch
from torch import nn

from tandem.data.datasets import Datasets


class Rows:
    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(130, 8, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index]

    def __getitems__(self, indices):
        return self.x[indices]

    def augmented(self, indices, epoch, seed):
        with open(f"given-{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps(indices.tolist()) + "\n")
        return self.x[indices]


class Small:
    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def build_datasets(self):
        return Datasets(Rows(), Rows())

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch), batch.sum(dim=1, keepdim=True))
