"""A script whose ranks wait for each other in its own collectives, and with FSDP; rank SLOW is slow."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
shards = os.environ["KIND"] == "fsdp"
if shards:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers[0], layers[2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(layers, mesh=mesh)
model = layers if shards else DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    time.sleep(0.06 if dist.get_rank() == int(os.environ["SLOW"]) else 0.012)
    x = torch.randn(80, 16)
    mean = x.mean(0)
    if not shards:
        dist.all_reduce(mean)
    loss = model(x - mean).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
