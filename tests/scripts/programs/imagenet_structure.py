"""The structure of torch's ImageNet example on small local data: worker function, meters, validation, best.

Mixed with nothing of tandem: it reads RANK and LOCAL_RANK itself, has global state, schedules, and resumes.
"""

import argparse
import os
import shutil
import time
from enum import Enum

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils.data
import torch.utils.data.distributed
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Subset, TensorDataset

if __name__ != "__mp_main__":  # loader processes import it too, from Python 3.14 on
    print(f"first line {time.time():.3f} pid {os.getpid()} rank {os.environ['RANK']}", flush=True)

parser = argparse.ArgumentParser(description="Training on pictures")
parser.add_argument("-j", "--workers", default=0, type=int)
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("-b", "--batch-size", default=64, type=int)
parser.add_argument("--lr", default=0.05, type=float)
parser.add_argument("-p", "--print-freq", default=2, type=int)
parser.add_argument("--resume", default="checkpoint.pth.tar", type=str)
parser.add_argument("--dist-backend", default="gloo", type=str)
parser.add_argument("--pause", default=0.0, type=float)
best_acc1 = 0.0


def main():
    args = parser.parse_args()
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    main_worker(int(os.environ["LOCAL_RANK"]), args)


def main_worker(_gpu, args):
    global best_acc1
    place = {"world_size": args.world_size, "rank": args.rank}
    dist.init_process_group(args.dist_backend, init_method="env://", **place)
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )  # fmt: skip
    model = nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
    start_epoch = 0
    if os.path.isfile(args.resume):
        checkpoint = torch.load(args.resume)
        start_epoch, best_acc1 = checkpoint["epoch"], checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        print(f"resuming from epoch {start_epoch}", flush=True)
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 4, (512,), generator=generator)
    pictures = torch.randn(512, 3, 16, 16, generator=generator) + labels.view(-1, 1, 1, 1) / 2
    everything = TensorDataset(pictures, labels)
    train_dataset, val_dataset = Subset(everything, range(384)), Subset(everything, range(384, 512))
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
    val_sampler = torch.utils.data.distributed.DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    share = args.batch_size // args.world_size
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=share, num_workers=args.workers, sampler=train_sampler
    )
    val_loader = torch.utils.data.DataLoader(
        val_dataset, batch_size=share, num_workers=args.workers, sampler=val_sampler
    )
    for epoch in range(start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, args)
        acc1, loss = validate(val_loader, model, criterion)
        scheduler.step()
        is_best, best_acc1 = acc1 > best_acc1, max(acc1, best_acc1)
        if args.rank == 0:
            save_checkpoint(
                {
                    "epoch": epoch + 1,
                    "state_dict": model.state_dict(),
                    "best_acc1": best_acc1,
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                },
                is_best,
                args.resume,
            )
    if args.rank == 0:
        print(f"final loss {loss:.9f}", flush=True)


def train(train_loader, model, criterion, optimizer, epoch, args):
    losses = AverageMeter("Loss", ":.4e")
    model.train()
    for i, (images, target) in enumerate(train_loader):
        loss = criterion(model(images), target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(args.pause)
        if i % args.print_freq == 0:
            print(f"Epoch: [{epoch}][{i}/{len(train_loader)}] {losses}")


def validate(val_loader, model, criterion):
    losses, top1 = AverageMeter("Loss", ":.4e", Summary.NONE), AverageMeter("Acc@1", ":6.2f", Summary.AVERAGE)
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            right = (output.argmax(1) == target).float().mean().item() * 100
            top1.update(right, images.size(0))
    losses.all_reduce()
    top1.all_reduce()
    return top1.avg, losses.avg


def save_checkpoint(state, is_best, filename):
    torch.save(state, filename + ".new")
    os.replace(filename + ".new", filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


class Summary(Enum):
    NONE = 0
    AVERAGE = 1


class AverageMeter:
    def __init__(self, name, fmt=":f", summary_type=Summary.AVERAGE):
        self.name, self.fmt, self.summary_type = name, fmt, summary_type
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()
        self.avg = self.sum / self.count

    def __str__(self):
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)


if __name__ == "__main__":
    main()
