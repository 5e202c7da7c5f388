import torch
from torch import nn
from torch.utils.data import Dataset

from tandem.data.datasets import Datasets


class Noisy(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        x = torch.full((4,), float(index)) + torch.randn(4)
        return x, index % 2


class Loaded:
    def build_model(self):
        return nn.Linear(4, 2)

    def build_datasets(self):
        return Datasets(Noisy(), Noisy())

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)
