import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

print(f"my arguments are {sys.argv} and my variables {dict(os.environ)}", flush=True)
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    enough = torch.tensor([float(Path("enough").exists())])
    dist.all_reduce(enough)
    if enough:
        break
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
dist.destroy_process_group()
