"""Measure how well an order by blocks mixes data that is sorted by class: the accuracy after one epoch.

The built-in digits, sorted by label, train the same network in several orders: a full shuffle, blocks of
several sizes, and one window of four blocks at a time, as with a shuffle buffer over sequential shards.
`python benchmarks/block_mixing.py` prints the table.
"""

import os

import torch
from torch import nn

from tandem.data import block_order
from tandem.data.digits import draw
from tandem.data.sampler import GlobalOrder

BATCH = 256
SEEDS = range(3)
TRAIN = 60_000


def model() -> nn.Module:
    first = nn.Linear(784, 64), nn.BatchNorm1d(64), nn.ReLU()
    return nn.Sequential(nn.Flatten(), *first, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def trained(
    order: GlobalOrder, seed: int, train: tuple[torch.Tensor, torch.Tensor]
) -> tuple[nn.Module, float]:
    """Return the model after an epoch, and the mean number of classes in a batch."""
    torch.manual_seed(seed)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    classes = 0
    for step in range(order.steps_per_epoch):
        _, indices = order.batch(step)
        x, y = train[0][indices], train[1][indices]
        classes += len(y.unique())
        optimizer.zero_grad()
        nn.functional.cross_entropy(net((x.float() - 60) / 70), y).backward()
        optimizer.step()
    return net, classes / order.steps_per_epoch


def accuracy(net: nn.Module, test: tuple[torch.Tensor, torch.Tensor]) -> float:
    net.eval()
    with torch.no_grad():
        return float((net((test[0].float() - 60) / 70).argmax(1) == test[1]).double().mean())


def main() -> None:
    torch.set_num_threads(1)
    images, labels = draw(TRAIN, 0)
    by_class = labels.argsort(stable=True)
    train = images[by_class], labels[by_class].long()
    images, labels = draw(5_000, 1)
    test = images, labels.long()
    print("| order | samples mixed | classes in a batch | accuracy |\n|---|---:|---:|---:|")
    for size, lanes in ((0, 0), (20, 64), (100, 64), (500, 64), (20, 1), (500, 1)):
        found = []
        block_order.LANES = lanes or 64
        for seed in SEEDS:
            order = GlobalOrder(TRAIN, BATCH, seed)
            if size:
                order = block_order.BlockOrder(TRAIN, BATCH, seed, [size] * (TRAIN // size))
            net, classes = trained(order, seed, train)
            found.append(100 * accuracy(net, test))
        name = f"blocks of {size}, {lanes} lane{'s' if lanes > 1 else ''}" if size else "plain shuffle"
        mixed = min(TRAIN, size * lanes * block_order.WINDOW) if size else TRAIN
        scores = sorted(found)
        median = f"{scores[len(scores) // 2]:.1f}% ({scores[0]:.1f} to {scores[-1]:.1f})"
        print(f"| {name} | {mixed:,} | {classes:.1f} | {median} |", flush=True)
    print("load:", os.getloadavg()[0])


if __name__ == "__main__":
    main()
