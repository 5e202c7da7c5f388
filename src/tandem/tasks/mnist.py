"""MNIST and Fashion-MNIST from their IDX files, raw or gzipped."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from tandem.data import datasets
from tandem.data.datasets import Datasets, download, find_idx_folder, idx_datasets, torchvision_for
from tandem.errors import ConfigError
from tandem.tasks.classification import LossAndSums, cross_entropy, strided_cnn


@dataclass
class Mnist:
    """Handwritten digits, 60,000 training and 10,000 evaluation images of 28 x 28."""

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
