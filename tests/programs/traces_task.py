import torch
from torch import nn


class Unspeakable(Exception):
    def __str__(self):
        raise TypeError("no text")


def shapes():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(3, 3))
    return model(torch.ones(2, 4))


def dtypes():
    return nn.Linear(4, 4)(torch.ones(2, 4, dtype=torch.float64))


def deep(depth=12):
    return shapes() if depth == 0 else deep(depth - 1)


def unspeakable():
    raise Unspeakable


class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        class Local(Exception):
            pass

        raise Local("row 7 is broken")
