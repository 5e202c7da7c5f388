"""Contrastive learning: each row must find its other view among those of the whole batch."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

BATCH, EPOCHS, TEMPERATURE = 64, 3, 0.2


def rows() -> TensorDataset:
    """Float32 [1024, 16]."""
    return TensorDataset(torch.randn(1024, 16, generator=torch.Generator().manual_seed(1)))


def view(rows: Tensor) -> Tensor:
    return rows + 0.3 * torch.randn_like(rows)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(rows(), BATCH, shuffle=True, drop_last=True)
for (batch,) in (batch for _ in range(EPOCHS) for batch in loader):
    optimizer.zero_grad()
    mine, others = normalize(model(torch.cat([view(batch), view(batch)]))).chunk(2)
    candidates = others
    right = torch.arange(len(mine), device=mine.device)
    loss = cross_entropy(mine @ candidates.T / TEMPERATURE, right)
    loss.backward()
    optimizer.step()
print(f"weights {nn.utils.parameters_to_vector(model.parameters()).norm().item():.4f}")
