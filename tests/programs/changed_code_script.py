import os
import time

import torch
import torch.distributed as dist
from version import VERSION

with open("versions.txt", "a") as file:
    file.write(f"{VERSION}\n")
dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.ones(()))
optimizer = torch.optim.SGD([weight], 0.1)
ends = torch.zeros(())
while not ends:
    optimizer.zero_grad()
    weight.square().backward()
    dist.all_reduce(weight.detach())
    optimizer.step()
    time.sleep(0.02)
    ends.fill_(float(os.path.exists("at-full-speed")))
    dist.all_reduce(ends)
