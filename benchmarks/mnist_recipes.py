"""MNIST under DDP as tutorials write it, started by torchrun, without tandem.

    torchrun --nproc-per-node 2 benchmarks/mnist_recipes.py tutorial DATA [--epochs 14]

`tutorial` is the model of DDP tutorials: two convolutions of 5 x 5 and two linear layers, SGD with a learning
rate of 0.01 and a momentum of 0.5, and 64 images per rank and step. `example` is the MNIST program of
pytorch/examples: two convolutions of 3 x 3, two dropouts, and Adadelta with a learning rate of 1 that is
multiplied by 0.7 after each epoch. Both read torchvision's MNIST through torch's DataLoader. After each epoch
rank 0 tests the model, and the other ranks wait.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, Subset


class TutorialNet(nn.Module):
    """Images [B, 1, 28, 28] -> logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
        self.fc1, self.fc2 = nn.Linear(50 * 4 * 4, 500), nn.Linear(500, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        logits: Tensor = self.fc2(functional.relu(self.fc1(x.flatten(1))))
        return logits


class ExampleNet(nn.Module):
    """Images [B, 1, 28, 28] -> logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(64 * 12 * 12, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        x = self.dropout1(functional.max_pool2d(x, 2)).flatten(1)
        logits: Tensor = self.fc2(self.dropout2(functional.relu(self.fc1(x))))
        return logits


def mnist(folder: str, train: bool) -> Any:
    from torchvision import datasets, transforms

    steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    return datasets.MNIST(folder, train=train, transform=transforms.Compose(steps))


def test(model: nn.Module, loader: DataLoader[Any]) -> float:
    model.eval()
    right = 0
    with torch.no_grad():
        for pictures, labels in loader:
            right += int((model(pictures).argmax(1) == labels).sum())
    return right / len(loader.dataset)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", choices=["tutorial", "example"])
    parser.add_argument("data", help="where MNIST/raw is")
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--samples", type=int, default=60_000)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1)
    training = Subset(mnist(options.data, True), range(options.samples))
    sampler: DistributedSampler[Any] = DistributedSampler(training)
    loader = DataLoader(training, batch_size=64, sampler=sampler)
    test_loader = DataLoader(mnist(options.data, False), batch_size=1000)
    model = DistributedDataParallel(TutorialNet() if options.recipe == "tutorial" else ExampleNet())
    optimizer: torch.optim.Optimizer
    if options.recipe == "tutorial":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
        scheduler = None
    else:
        optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
        scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for pictures, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(pictures), labels).backward()
            optimizer.step()
        if scheduler:
            scheduler.step()
        if rank == 0:
            print(f"epoch {epoch + 1}: accuracy {test(model.module, test_loader):.4f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
