"""Your own images: a directory per class, under train/ and val/, and a torchvision model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from tandem.data.datasets import Datasets, torchvision_for
from tandem.errors import ConfigError
from tandem.tasks.classification import LossAndSums, cross_entropy
from tandem.tasks.normalized import normalized
from tandem.text import did_you_mean, nearest, one_line

LEFT_BY_TOOLS = frozenset(
    ("__MACOSX", "@eaDir", "lost+found", "#recycle", "#snapshot", "$RECYCLE.BIN", "System Volume Information")
)
"""Directories that archives, file servers and file systems leave among the data; others begin with a dot."""
_MEAN = (0.485, 0.456, 0.406)  # of ImageNet
_STD = (0.229, 0.224, 0.225)


class ImageFiles(Dataset[tuple[Any, int]]):
    """The images in `folder`/CLASS in the order of torchvision's ImageFolder; errors name the file."""

    def __init__(self, folder: Path, classes: Sequence[str], transform: Callable[[Any], Any]) -> None:
        """Raises FileNotFoundError for a class without images."""
        from torchvision.datasets import folder as pictures

        # make_dataset expands `~` itself, and relative_to needs the same path.
        folder = folder.expanduser()

        def is_picture(path: str) -> bool:
            return pictures.is_image_file(path) and not any(
                map(is_left_by_tools, Path(path).relative_to(folder).parts)
            )

        self.classes = list(classes)
        self.transform = transform
        self._load = pictures.default_loader
        self.class_to_idx = {name: index for index, name in enumerate(classes)}
        self.samples = pictures.make_dataset(folder, self.class_to_idx, is_valid_file=is_picture)
        self.targets = [target for _, target in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Return (transformed image, class index). Raises OSError for a file that is not a valid image."""
        path, target = self.samples[index]
        try:
            picture = self._load(path)
        except Exception as error:  # decoders of the many formats raise many types of errors
            raise OSError(
                f"cannot read {path} as an image ({one_line(error)}); replace or remove it"
            ) from error
        return self.transform(picture), target


def is_left_by_tools(name: str) -> bool:
    """Return True if a file or directory of this name is not data."""
    return name.startswith(".") or name in LEFT_BY_TOOLS


@dataclass
class ImageFolder:
    """`data_dir`/train/CLASS/*.jpg and `data_dir`/val/CLASS/*.jpg; `--workers` processes decode them."""

    data_dir: Path = Path("data")
    model: str = "resnet18"
    image_size: int = 224

    def build_model(self) -> nn.Module:
        models = torchvision_for("task image-folder").models
        # Other modules of torchvision have models for detection and segmentation.
        known = models.list_models(module=models)
        if self.model not in known:
            hint = did_you_mean(nearest(self.model, known), "; expected, for example, resnet18")
            raise ConfigError(f"--task.model: {self.model!r} is not a torchvision model{hint}")
        model: nn.Module = models.get_model(self.model, weights=None, num_classes=len(self._classes("train")))
        return normalized(model, _MEAN, _STD)

    def build_datasets(self) -> Datasets:
        vision = torchvision_for("task image-folder")
        train = self._classes("train")
        evaluation = self._classes("val")
        if train != evaluation:
            different = ", ".join(sorted(set(train) ^ set(evaluation)))
            raise ConfigError(
                f"train and val in {self.data_dir} have different classes; create in both: {different}"
            )
        transforms = vision.transforms
        # Images stay bytes until they are on the device; see normalized.py.
        as_tensor = [transforms.PILToTensor()]
        cut = [transforms.RandomResizedCrop(self.image_size), transforms.RandomHorizontalFlip()]
        # This is ImageNet's usual evaluation crop: 224 pixels of 256, a factor of 8/7.
        center = [transforms.Resize(self.image_size * 8 // 7), transforms.CenterCrop(self.image_size)]
        return Datasets(
            self._folder("train", train, transforms.Compose(cut + as_tensor)),
            self._folder("val", train, transforms.Compose(center + as_tensor)),
        )

    def loss(self, model: nn.Module, batch: Any) -> LossAndSums:
        return cross_entropy(model, batch)

    def _folder(self, part: str, classes: Sequence[str], transform: Any) -> ImageFiles:
        try:
            return ImageFiles(self.data_dir / part, classes, transform)
        except FileNotFoundError as error:  # a class without images
            raise ConfigError(f"{self.data_dir / part} is incomplete ({one_line(error)})") from error

    def _classes(self, part: str) -> list[str]:
        folder = self.data_dir / part
        found = (entry.name for entry in folder.glob("*") if entry.is_dir())
        classes = sorted(name for name in found if not is_left_by_tools(name))
        if not classes:
            raise ConfigError(
                f"task image-folder found no class folders in {folder}: "
                "expected train/CLASS/*.jpg and val/CLASS/*.jpg under --data-dir"
            )
        return classes
