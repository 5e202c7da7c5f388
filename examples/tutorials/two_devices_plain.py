"""Plain DDP around a model whose two halves lie on two devices of its rank, as tutorials write it.

torchrun --nproc-per-node 2 examples/tutorials/two_devices_plain.py    # two GPUs for each rank, or the CPU
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoDevices(nn.Module):
    """Rows [B, 10] on any device -> [B, 5] on the second one."""

    def __init__(self, first, second):
        super().__init__()
        self.devices = first, second
        self.first = nn.Sequential(nn.Linear(10, 10), nn.ReLU()).to(first)
        self.second = nn.Linear(10, 5).to(second)

    def forward(self, x):
        return self.second(self.first(x.to(self.devices[0])).to(self.devices[1]))


def main():
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    gpus = torch.cuda.device_count()
    dist.init_process_group("nccl" if gpus else "gloo")
    devices = [torch.device("cuda", local_rank * 2 + i) if gpus else torch.device("cpu") for i in (0, 1)]
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoDevices(*devices))  # no device_ids: it is on several already
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(20):
        x = torch.randn(20, 10, generator=generator)
        optimizer.zero_grad()
        out = model(x)
        loss = nn.functional.mse_loss(out, x[:, :5].to(devices[1]))  # labels where the output is
        loss.backward()
        optimizer.step()
    dist.all_reduce(loss := loss.detach())
    if rank == 0:
        print(f"loss {loss.item() / dist.get_world_size():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
