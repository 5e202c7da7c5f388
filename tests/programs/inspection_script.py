"""A script with DDP that calls nothing of tandem, and leaves the bytes of its weights."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(3)
torch.set_num_threads(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
for _ in range(400):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_bytes(model.module.weight.detach().numpy().tobytes())
