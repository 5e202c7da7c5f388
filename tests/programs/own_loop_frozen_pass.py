"""A GAN that freezes its discriminator in the generator's pass, as pix2pix does."""

import torch
from torch import nn

import tandem

run = tandem.start()
generator = run.wrap(nn.Linear(4, 8))
discriminator = run.wrap(nn.Linear(8, 1))
made = torch.optim.Adam(generator.parameters())
judged = torch.optim.Adam(discriminator.parameters())
run.keep(generator=generator, discriminator=discriminator, made=made, judged=judged)
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
for (real,) in run.batches(torch.utils.data.TensorDataset(x), batch_size=16, epochs=2):
    fake = generator(torch.randn(len(real), 4))
    discriminator.requires_grad_(True)
    run.backward(discriminator(fake.detach()).mean() - discriminator(real).mean())
    judged.step()
    judged.zero_grad()
    discriminator.requires_grad_(False)
    run.backward(-discriminator(fake).mean())
    made.step()
    made.zero_grad()
print("steps:", run.step)
