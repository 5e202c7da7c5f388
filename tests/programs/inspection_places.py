"""Four ranks at four places: asleep, in a collective, in native code that holds the GIL, computing."""

import itertools
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()


def asleep() -> None:
    time.sleep(600)  # line 21


def in_a_collective() -> None:
    dist.barrier()  # line 25


def in_native_code() -> None:
    max(itertools.repeat(1, 10**12))  # line 29


def computing() -> None:
    while True:
        sum(range(1000))  # line 34


print("at its place", rank, flush=True)
sys.stdout.flush()
(asleep, in_a_collective, in_native_code, computing)[rank]()
