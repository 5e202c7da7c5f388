import torch
from torch import nn

from tandem import Datasets

X = torch.randn(96, 8, generator=torch.Generator().manual_seed(3))


class Unfreezes:
    frozen_first = True

    def build_model(self):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        model[0].requires_grad_(not self.frozen_first)
        return model

    def build_datasets(self):
        return Datasets(torch.utils.data.TensorDataset(X), None)

    def loss(self, model, batch):
        return model(batch[0]).square().mean()

    def after_step(self, model, step):
        if step == 5:
            model[0].requires_grad_(self.frozen_first)


class Freezes(Unfreezes):
    frozen_first = False
