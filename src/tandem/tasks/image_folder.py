"""Your own pictures: one folder for each class, under train/ and val/, and a torchvision model."""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from tandem.data.datasets import Datasets, one_line, torchvision_for
from tandem.errors import ConfigError
from tandem.tasks.classification import LossAndSums, cross_entropy
from tandem.tasks.normalised import normalised

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


@dataclass
class ImageFolder:
    """`data_dir`/train/CLASS/*.jpg and `data_dir`/val/CLASS/*.jpg; `--workers` decodes them."""

    data_dir: Path = Path("data")
    model: str = "resnet18"
    image_size: int = 224

    def build_model(self) -> nn.Module:
        models = torchvision_for("image-folder").models
        known = models.list_models(module=models)
        if self.model not in known:
            near = ", ".join(get_close_matches(self.model, known, n=3)) or "resnet18"
            raise ConfigError(f"--task.model is {self.model!r}, not a torchvision model; near it: {near}")
        model: nn.Module = models.get_model(self.model, weights=None, num_classes=len(self._classes("train")))
        return normalised(model, _MEAN, _STD)

    def build_datasets(self) -> Datasets:
        vision = torchvision_for("image-folder")
        train, evaluation = self._classes("train"), self._classes("val")
        if train != evaluation:
            different = ", ".join(sorted(set(train) ^ set(evaluation)))
            raise ConfigError(
                f"train and val in {self.data_dir} have different classes: make in both {different}"
            )
        transforms = vision.transforms
        as_tensor = [transforms.PILToTensor()]
        cut = [transforms.RandomResizedCrop(self.image_size), transforms.RandomHorizontalFlip()]
        centre = [transforms.Resize(self.image_size * 8 // 7), transforms.CenterCrop(self.image_size)]
        return Datasets(
            self._folder(vision, "train", transforms.Compose(cut + as_tensor)),
            self._folder(vision, "val", transforms.Compose(centre + as_tensor)),
        )

    def loss(self, model: nn.Module, batch: Any) -> LossAndSums:
        return cross_entropy(model, batch)

    def _folder(self, vision: Any, part: str, transform: Any) -> Any:
        try:
            return vision.datasets.ImageFolder(self.data_dir / part, transform)
        except FileNotFoundError as error:  # a class without a picture
            raise ConfigError(f"{self.data_dir / part} is incomplete ({one_line(error)})") from error

    def _classes(self, part: str) -> list[str]:
        folder = self.data_dir / part
        classes = sorted(entry.name for entry in folder.glob("*") if entry.is_dir())
        if not classes:
            raise ConfigError(
                f"task image-folder found no class folders in {folder}: "
                "expected train/CLASS/*.jpg and val/CLASS/*.jpg under --data-dir"
            )
        return classes
