"""Plain DDP: logistic regression with a buffer that counts, to see what DDP does with buffers.

torchrun --nproc-per-node 2 examples/tutorials/counting_buffer_plain.py [--keep-buffers]
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EPOCHS = 8, 3  # a batch of each rank


class LogisticRegression(nn.Module):
    """Rows [B, 2] -> logits [B]; counts the rows it was trained with whose first number is above zero."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("positives", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.positives += (x[:, 0] > 0).sum()
        return self.linear(x).squeeze(1)


def rows():
    """Float32 [256, 2], and whether their sum is above zero."""
    x = torch.randn(256, 2, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).float())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep-buffers", action="store_true", help="every rank keeps its own")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    buffers = {"broadcast_buffers": False} if options.keep_buffers else {}
    model = DistributedDataParallel(LogisticRegression(), **buffers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sampler = DistributedSampler(rows())
    loader = DataLoader(rows(), batch_size=BATCH, sampler=sampler, drop_last=True)
    seen, last = 0, 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = binary_cross_entropy_with_logits(model(x), y)
            loss.backward()
            optimizer.step()
            last = int((x[:, 0] > 0).sum())
            seen += last
    print(f"rank {rank}: saw {seen}, {last} of them last; its buffer says {model.module.positives.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
