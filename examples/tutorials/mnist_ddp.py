"""Plain DDP, as tutorials write it: a CNN with two dropouts on MNIST. It knows nothing of tandem.

RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which process this is. They are set by hand:

    WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 RANK=0 LOCAL_RANK=0 python mnist_ddp.py &
    WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 RANK=1 LOCAL_RANK=1 python mnist_ddp.py

by torchrun --nproc-per-node 2 mnist_ddp.py, by Slurm's variables (see README.md), or by tandem launch.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms


class Net(nn.Module):
    """Pictures [B, 1, 28, 28] -> logits [B, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(32 * 12 * 12, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        return self.fc2(self.dropout2(F.relu(self.fc1(x))))


def mnist(folder, train, download=False):
    as_tensor = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    return datasets.MNIST(folder, train=train, transform=as_tensor, download=download)


def train(model, device, loader, optimizer, epoch, rank):
    model.train()
    for step, (pictures, labels) in enumerate(loader):
        pictures, labels = pictures.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pictures), labels)
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            mean = loss.detach().clone()  # what this rank saw is not what the others saw
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            if rank == 0:
                print(f"epoch {epoch} step {step}: loss {mean.item():.6f}", flush=True)


def test(model, device, loader):
    """Rank 0 alone looks at the whole test set, and the others wait."""
    model.eval()
    right = 0
    with torch.no_grad():
        for pictures, labels in loader:
            right += (model(pictures.to(device)).argmax(1) == labels.to(device)).sum().item()
    print(f"accuracy {right / len(loader.dataset):.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=60, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--save", default="mnist_cnn.pt")
    parser.add_argument("--download", action="store_true")
    options = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=world_size)
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    if local_rank == 0 and options.download:
        mnist(options.data_dir, True, download=True)
    dist.barrier()
    training = mnist(options.data_dir, True)
    sampler = DistributedSampler(training, shuffle=True, seed=0)
    loader = DataLoader(training, batch_size=options.batch_size, sampler=sampler)
    test_loader = DataLoader(mnist(options.data_dir, False), batch_size=240)
    model = DistributedDataParallel(Net().to(device), device_ids=[local_rank] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr * world_size, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=1, gamma=options.gamma)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        train(model, device, loader, optimizer, epoch, rank)
        if rank == 0:
            test(model.module, device, test_loader)
        dist.barrier()
        scheduler.step()
    if rank == 0:
        torch.save(model.module.state_dict(), options.save)
        print(f"weights {sum(p.double().sum().item() for p in model.parameters()):.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
