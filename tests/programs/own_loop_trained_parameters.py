"""A loop in which the trained parameters change after run.wrap, in the way that KIND says."""

import os

import torch
from torch import nn

import tandem

KIND = os.environ["KIND"]
run = tandem.start()
first = nn.LazyLinear(16) if KIND == "lazy" else nn.Linear(8, 16)
net = nn.Sequential(first, nn.Tanh(), nn.Linear(16, 1))
teacher = nn.Sequential(nn.Linear(8, 1)).requires_grad_(False)
if KIND == "unfrozen":
    net[0].requires_grad_(False)
model = run.wrap(net)
wrapped_teacher = run.wrap(teacher)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.keep(model=model, teacher=wrapped_teacher, optimizer=optimizer)
weight = next(net.parameters())
before = weight.detach().clone() if KIND == "frozen" else weight
x = torch.randn(128, 8, generator=torch.Generator().manual_seed(3))
for (rows,) in run.batches(torch.utils.data.TensorDataset(x), batch_size=16, steps=12):
    if KIND == "frozen":
        if run.step == 6:
            print("frozen until step 6:", torch.equal(before, weight), flush=True)
        net[0].requires_grad_(run.step >= 6)
    elif KIND == "new" and run.step == 6:
        net.append(nn.Linear(1, 1))
        optimizer.add_param_group({"params": net[-1].parameters()})
    elif KIND == "unfrozen teacher" and run.step == 6:
        teacher.requires_grad_(True)
        optimizer.add_param_group({"params": teacher.parameters()})
    elif run.step == 6:
        net.requires_grad_(True)
    run.backward((model(rows) - wrapped_teacher(rows)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
