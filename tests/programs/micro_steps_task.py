import json

import torch
from torch import nn
from torch.nn import functional

from tandem.data import seeds
from tandem.data.datasets import Datasets, TensorRows

seeded, seed = [], seeds.seed_generators


def counted(value):
    seeded.append(value)
    seed(value)


seeds.seed_generators = counted


class Noted:
    def build_model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    def build_datasets(self):
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(7))
        rows = TensorRows(x, x[:, :2].argmax(1))
        return Datasets(rows, TensorRows(x[:10], x[:10, :2].argmax(1)))

    def loss(self, model, batch):
        x, y = batch
        out = model(x)
        with open("noted.jsonl", "a") as file:
            now = {"training": model.training, "type": str(out.dtype), "seeds": list(seeded), "rows": len(x)}
            file.write(json.dumps(now) + "\n")
        seeded.clear()
        return functional.cross_entropy(out.float(), y)
