"""Plain DDP, in the structure of torch's tutorial "Multi GPU training with DDP": Trainer, dataset, argparse.

It knows nothing of tandem. It keeps its own snapshot, as that tutorial's fault-tolerant version does.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

if __name__ != "__mp_main__":  # loader processes import it too, from Python 3.14 on
    print(f"first line {time.time():.3f} pid {os.getpid()} rank {os.environ['RANK']}", flush=True)


class Points(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 20, generator=generator)
        self.y = self.x[:, :1] * 2 + 1

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Trainer:
    def __init__(self, model, data, optimizer, options):
        self.rank = dist.get_rank()
        self.model, self.data, self.optimizer, self.options = DDP(model), data, optimizer, options
        self.epoch = 0
        if os.path.exists(options.snapshot):
            snapshot = torch.load(options.snapshot)
            self.model.module.load_state_dict(snapshot["model"])
            self.optimizer.load_state_dict(snapshot["optimizer"])
            self.epoch = snapshot["epoch"]
            print(f"resuming from epoch {self.epoch}", flush=True)

    def save(self):
        state = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
        }
        torch.save(state, self.options.snapshot + ".new")
        os.replace(self.options.snapshot + ".new", self.options.snapshot)

    def run_epoch(self):
        self.data.sampler.set_epoch(self.epoch)
        for step, (x, y) in enumerate(self.data):
            if self.options.bug_at == (self.epoch, step) and self.rank == 1:
                raise ValueError("a bug of rank 1")
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            time.sleep(self.options.pause)
        self.loss = loss.detach()

    def train(self):
        while self.epoch < self.options.epochs:
            self.run_epoch()
            self.epoch += 1
            if self.rank == 0:
                self.save()
        dist.all_reduce(self.loss)
        if self.rank == 0:
            print(f"final loss {self.loss.item() / dist.get_world_size():.9f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--snapshot", default="snapshot.pt")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--bug-at", type=lambda text: tuple(map(int, text.split(":"))), default=None)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    points = Points(640)
    data = DataLoader(points, batch_size=32, sampler=DistributedSampler(points), num_workers=options.workers)
    Trainer(model, data, optimizer, options).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
