"""A GAN that learns points on a ring: two models, two optimizers."""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as judged
from torch.utils.data import DataLoader, TensorDataset

NOISE, WIDTH, BATCH, EPOCHS = 4, 32, 64, 3


def network(inputs: int, outputs: int) -> nn.Module:
    layers = nn.Linear(inputs, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2)
    return nn.Sequential(*layers, nn.Linear(WIDTH, outputs))


def ring() -> TensorDataset:
    """Points [1024, 2] near the unit circle."""
    generator = torch.Generator().manual_seed(1)
    angles = torch.rand(1024, generator=generator) * 2 * torch.pi
    points = torch.stack([angles.cos(), angles.sin()], dim=1)
    return TensorDataset(points + 0.05 * torch.randn(1024, 2, generator=generator))


def true(logits: Tensor) -> Tensor:
    return judged(logits, torch.ones_like(logits))


def false(logits: Tensor) -> Tensor:
    return judged(logits, torch.zeros_like(logits))


torch.manual_seed(0)
generator = network(NOISE, 2)
critic = network(2, 1)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
loader = DataLoader(ring(), BATCH, shuffle=True, drop_last=True)
for (real,) in (batch for _ in range(EPOCHS) for batch in loader):
    fake = generator(torch.randn(len(real), NOISE, device=real.device))

    optimizer_c.zero_grad()
    loss_c = true(critic(real)) + false(critic(fake.detach()))
    loss_c.backward()
    optimizer_c.step()

    optimizer_g.zero_grad()
    loss_g = true(critic(fake))
    loss_g.backward()
    optimizer_g.step()
print(f"weights {nn.utils.parameters_to_vector(generator.parameters()).norm().item():.4f}")
