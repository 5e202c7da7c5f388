"""The loss and two small networks of the classification tasks, and the tasks whose data is downloaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tandem.data import datasets
from tandem.data.datasets import (
    Augment,
    Datasets,
    TensorImages,
    download,
    find_idx_folder,
    idx_datasets,
    random_crop_flip,
    torchvision_for,
)
from tandem.errors import ConfigError

LossAndSums = tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]
"""(mean loss, {name: (sum over the samples, number of samples)}), all tensors on the device of the batch."""


def cross_entropy(model: nn.Module, batch: Any) -> LossAndSums:
    """Return loss and accuracy of a batch (inputs, int64 labels [B]); logits are [B, classes]."""
    inputs, labels = batch
    logits = model(inputs)
    correct = (logits.argmax(dim=1) == labels).sum()
    count = torch.full_like(correct, len(labels))
    return functional.cross_entropy(logits, labels), {"accuracy": (correct, count)}


def strided_cnn(classes: int = 10) -> nn.Sequential:
    """Grayscale 28 x 28 images -> logits; three strided convolutions with batch norm, 11,074 parameters."""
    widths = (1, 8, 16, 32)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        layers += [
            # BatchNorm subtracts the mean, so a bias before it has no effect.
            nn.Conv2d(inputs, outputs, kernel_size=3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * 4 * 4, classes))


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut (He et al., 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            # The paper's CIFAR networks pad with zeros here (option A). A projection is option B.
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.relu(self.body(inputs) + self.shortcut(inputs))


def small_resnet(width: int, classes: int = 10) -> nn.Sequential:
    """Color 32 x 32 images -> logits; ResNet-20 with width 16."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    ]
    inputs = width
    # Three stages of n = 3 blocks have 6n + 2 = 20 layers, counted as in the paper.
    for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
        for block in range(3):
            layers.append(ResidualBlock(inputs, outputs, stride if block == 0 else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


@dataclass
class Mnist:
    """Handwritten digits, 60,000 training and 10,000 evaluation images of 28 x 28, in IDX files."""

    data_dir: Path = Path("data")
    download: bool = False

    name: ClassVar[str] = "mnist"
    torchvision_class: ClassVar[str] = "MNIST"
    # These are the mean and deviation of the training set's pixels, for values from 0 to 1.
    mean: ClassVar[float] = 0.1307
    std: ClassVar[float] = 0.3081

    def prepare(self) -> None:
        """Download the files if requested. Raises ConfigError if they are still missing."""
        if self.download and find_idx_folder(self._folders()) is None:
            # Files that are already there need no torchvision.
            make = getattr(torchvision_for(f"task {self.name}").datasets, self.torchvision_class)
            download(self.name, lambda: make(self.data_dir, download=True))  # downloads both parts
        self._folder()

    def build_model(self) -> nn.Module:
        return strided_cnn()

    def build_datasets(self) -> Datasets:
        return idx_datasets(self._folder(), self.mean, self.std)

    def loss(self, model: nn.Module, batch: Any) -> LossAndSums:
        return cross_entropy(model, batch)

    def _folders(self) -> tuple[Path, ...]:
        return self.data_dir, self.data_dir / self.name, self.data_dir / self.torchvision_class / "raw"

    def _folder(self) -> Path:
        folder = find_idx_folder(self._folders())
        if folder is None:
            raise ConfigError(
                f"task {self.name} found no folder with {', '.join(datasets.NAMES)} (or .gz): "
                f"looked in {', '.join(map(str, self._folders()))}; put them there, or add --download"
            )
        return folder


@dataclass
class FashionMnist(Mnist):
    """Images of clothing in the format of MNIST."""

    name: ClassVar[str] = "fashion-mnist"
    torchvision_class: ClassVar[str] = "FashionMNIST"
    mean: ClassVar[float] = 0.2860
    std: ClassVar[float] = 0.3530


@dataclass
class Cifar10:
    """50,000 training and 10,000 evaluation color images of 32 x 32; crops and flips in training.

    They are read once through torchvision, which checks the MD5 of every file, and kept in memory.
    """

    data_dir: Path = Path("data")
    download: bool = False
    width: int = 16
    augment: bool = True

    # These are each channel's mean and deviation in the training set, for values from 0 to 1.
    mean: ClassVar[tuple[float, float, float]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, float, float]] = (0.2470, 0.2435, 0.2616)

    def prepare(self) -> None:
        """Download the files if requested; complete files are not downloaded again."""
        if self.download:
            vision = torchvision_for("task cifar10")
            download("cifar10", lambda: vision.datasets.CIFAR10(self.data_dir, download=True))

    def build_model(self) -> nn.Module:
        return small_resnet(self.width)

    def build_datasets(self) -> Datasets:
        return Datasets(self._read(True, random_crop_flip if self.augment else None), self._read(False, None))

    def loss(self, model: nn.Module, batch: Any) -> LossAndSums:
        return cross_entropy(model, batch)

    def _read(self, train: bool, augment: Augment | None) -> TensorImages:
        vision = torchvision_for("task cifar10")
        try:
            read = vision.datasets.CIFAR10(self.data_dir, train)
        # torchvision raises this for missing and for damaged files.
        except RuntimeError as error:
            raise ConfigError(
                f"task cifar10 found no complete cifar-10-batches-py (MD5 checked) in {self.data_dir}: "
                "put it there, or add --download"
            ) from error
        labels = torch.tensor(read.targets, dtype=torch.int64)
        return TensorImages(torch.from_numpy(read.data), labels, self.mean, self.std, augment)
