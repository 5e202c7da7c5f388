"""One class in fifty: `sample_weights` draws both equally often, and the scores count the rare one.

    tandem launch --nodes 2 --task examples/rare_class.py:RareClass --batch-size 120
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tandem import Datasets


class RareClass:
    def build_model(self):
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))

    def build_datasets(self):
        x = torch.randn(7_200, 10, generator=torch.Generator().manual_seed(0))
        y = (x[:, :4].sum(1) > 4.1).long()
        return Datasets(TensorDataset(x[:6_000], y[:6_000]), TensorDataset(x[6_000:], y[6_000:]))

    def sample_weights(self, train):
        labels = train.tensors[1]
        return 1.0 / labels.bincount()[labels]

    def loss(self, model, batch):
        x, y = batch
        out, rare = model(x), y == 1
        found = (out.argmax(1)[rare] == 1).sum()
        sums = {"rare": (rare.sum(), len(y)), "recall": (found, rare.sum())}
        return nn.functional.cross_entropy(out, y), sums
