"""Contrastive learning: each row must find its other view among those of all ranks."""

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import TensorDataset

import tandem

BATCH, EPOCHS, TEMPERATURE = 64, 3, 0.2


def rows() -> TensorDataset:
    """Float32 [1024, 16]."""
    return TensorDataset(torch.randn(1024, 16, generator=torch.Generator().manual_seed(1)))


def view(rows: Tensor) -> Tensor:
    return rows + 0.3 * torch.randn_like(rows)


run = tandem.start()
model = run.wrap(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
run.keep(model=model, optimizer=optimizer)
for (batch,) in run.batches(rows(), batch_size=BATCH, epochs=EPOCHS):
    optimizer.zero_grad()
    mine, others = normalize(model(torch.cat([view(batch), view(batch)]))).chunk(2)
    candidates = torch.cat(all_gather(others))
    right = run.rank * len(mine) + torch.arange(len(mine), device=mine.device)
    loss = cross_entropy(mine @ candidates.T / TEMPERATURE, right)
    run.backward(loss)
    optimizer.step()
print(f"weights {nn.utils.parameters_to_vector(model.parameters()).norm().item():.4f}")
