import random

import numpy
import torch
from torch import nn

from tandem import Datasets

X = torch.randn(96, 8, generator=torch.Generator().manual_seed(3))


class Splits:
    def build_model(self):
        model = nn.Linear(8, 1)
        nn.init.constant_(model.bias, random.random() + float(numpy.random.rand()))
        return model

    def build_datasets(self):
        rows = list(range(96))
        random.shuffle(rows)
        rows = numpy.random.permutation(rows)[:80].tolist()
        chosen = torch.utils.data.Subset(torch.utils.data.TensorDataset(X), rows)
        train, evaluation = torch.utils.data.random_split(chosen, [64, 16])
        return Datasets(train, evaluation)

    def loss(self, model, batch):
        return (model(batch[0]) - 1).square().mean()
