"""A new head on a frozen trunk, a schedule, and an average of the weights (EMA) beside them."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

BATCH, EPOCHS = 64, 3


def network() -> nn.Module:
    """A trunk that stays as it is, and a head to train."""
    trunk = nn.Sequential(nn.Linear(16, 64), nn.ReLU()).requires_grad_(False)
    head = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
    return nn.Sequential(trunk, head)


def rows() -> TensorDataset:
    """Float32 [1024, 16], and which of the first three columns is the largest."""
    x = torch.randn(1024, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1))


torch.manual_seed(0)
model = network()
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=1000)
loader = DataLoader(rows(), BATCH, shuffle=True, drop_last=True)
for inputs, labels in (batch for _ in range(EPOCHS) for batch in loader):
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs), labels)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    average.update_parameters(model)
print(f"weights {nn.utils.parameters_to_vector(model.parameters()).norm().item():.4f}")
