"""CIFAR-10, read once through torchvision (which checks the MD5 of every file) and kept in memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from tandem.data.datasets import Augment, Datasets, TensorImages, download, random_crop_flip, torchvision_for
from tandem.errors import ConfigError
from tandem.tasks.classification import LossAndSums, cross_entropy, small_resnet


@dataclass
class Cifar10:
    """50,000 training and 10,000 evaluation color images of 32 x 32; crops and flips in training."""

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
