import torch
from torch import nn

from tandem.data.datasets import Datasets


class Fades:
    def build_model(self):
        return nn.Linear(4, 1)

    def build_datasets(self):
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(7))
        return Datasets(list(x), list(x[:10]))

    def collate(self, samples, step):
        return torch.stack(samples), step

    def loss(self, model, batch, step, epoch):
        x, of_batch = batch
        assert of_batch == step and epoch == step // 5, (of_batch, step, epoch)
        n = len(x)
        sums = {"step": (step * n, n), "epoch": (epoch * n, n)}
        return (model(x) ** 2).mean() * (1 + step) / (1 + epoch), sums
