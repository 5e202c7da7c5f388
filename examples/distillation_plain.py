"""Knowledge distillation: a small model learns what a large one says."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.utils.data import DataLoader, TensorDataset

BATCH, EPOCHS, TEMPERATURE = 64, 3, 2.0


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 3))


def rows() -> TensorDataset:
    """Float32 [1024, 16], and which of the first three columns is the largest."""
    x = torch.randn(1024, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1))


torch.manual_seed(0)
teacher = network(256).requires_grad_(False).eval()
student = network(16)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(rows(), BATCH, shuffle=True, drop_last=True)
for inputs, labels in (batch for _ in range(EPOCHS) for batch in loader):
    optimizer.zero_grad()
    logits = student(inputs)
    said, wanted = (log_softmax(each / TEMPERATURE, dim=1) for each in (logits, teacher(inputs)))
    soft = kl_div(said, wanted, reduction="batchmean", log_target=True) * TEMPERATURE**2
    loss = soft + cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
print(f"weights {nn.utils.parameters_to_vector(student.parameters()).norm().item():.4f}")
