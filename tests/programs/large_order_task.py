"""A set so large that its order is computed, in ten steps an epoch: as a task, and as a loop."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tandem

SAMPLES = 1_000_000


def rows():
    return TensorDataset(torch.linspace(-1, 1, SAMPLES)[:, None])


class Large:
    def build_model(self):
        return nn.Linear(1, 1)

    def build_datasets(self):
        return tandem.Datasets(rows(), None)

    def loss(self, model, batch):
        return (model(batch[0]) - batch[0].sign()).square().mean()


if __name__ == "__main__":
    run = tandem.start()
    model = run.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.keep(model=model, optimizer=optimizer)
    for (x,) in run.batches(rows(), batch_size=SAMPLES // 10, steps=int(sys.argv[1])):
        optimizer.zero_grad()
        run.backward((model(x) - x.sign()).square().mean())
        optimizer.step()
