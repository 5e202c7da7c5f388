import os
import threading

import torch
import torch.distributed as dist
from torch import nn

import tandem

run = tandem.start()
model = run.wrap(nn.Linear(8, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
run.keep(model=model, opt=opt)
x = torch.randn(480, 8)
data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
for a, b in run.batches(data, batch_size=24, steps=60):
    if run.step == 30:
        if os.environ["HOW"] == "asleep" and run.rank == 1:
            threading.Event().wait()
        if os.environ["HOW"] == "alone" and run.rank == 0:
            dist.barrier()
    run.backward(nn.functional.cross_entropy(model(a), b))
    opt.step()
    opt.zero_grad()
