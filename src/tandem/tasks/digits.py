"""The default task: digits drawn on this machine, so there is nothing to download."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tandem.data.datasets import Datasets, TensorImages, idx_datasets
from tandem.data.digits import TRAIN_SAMPLES, prepare_digits
from tandem.errors import ConfigError
from tandem.tasks.classification import LossAndSums, cross_entropy, strided_cnn

_MEAN = 0.187
_STD = 0.209


@dataclass
class Digits:
    """Digits in 28 x 28 grayscale pixels; `train_samples` below 60,000 shortens epochs."""

    data_dir: Path = Path("data")
    train_samples: int = TRAIN_SAMPLES

    def __post_init__(self) -> None:
        if not 1 <= self.train_samples <= TRAIN_SAMPLES:
            raise ConfigError(
                f"--task.train-samples: invalid value {self.train_samples}; expected 1 to {TRAIN_SAMPLES}"
            )

    def prepare(self) -> None:
        prepare_digits(self.data_dir / "digits")

    def build_model(self) -> nn.Module:
        return strided_cnn()

    def build_datasets(self) -> Datasets:
        self.prepare()
        train, evaluation = idx_datasets(self.data_dir / "digits", _MEAN, _STD)
        first = slice(self.train_samples)
        return Datasets(TensorImages(train.images[first], train.labels[first], [_MEAN], [_STD]), evaluation)

    def loss(self, model: nn.Module, batch: Any) -> LossAndSums:
        return cross_entropy(model, batch)
