"""A custom loop whose model exchanges a value between ranks in its forward; rank SLOW is slow there."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn

import tandem


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        time.sleep(0.06 if dist.get_rank() == int(os.environ["SLOW"]) else 0.012)
        mean = x.mean(0)
        dist.all_reduce(mean)
        return self.layers(x - mean / dist.get_world_size())


run = tandem.start()
model = run.wrap(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.keep(model=model, optimizer=optimizer)
x = torch.randn(2400, 16, generator=torch.Generator().manual_seed(3))
data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
for inputs, labels in run.batches(data, batch_size=240, steps=1000000):
    run.backward(nn.functional.cross_entropy(model(inputs), labels))
    optimizer.step()
    optimizer.zero_grad()
