"""Datasets that return a whole batch at once, and readers for common formats.

A dataset is map-style (`__len__`, `__getitem__`) or iterable (see `implementations.py`). A map-style dataset
can also return many samples at once, which makes small models fast:

    __getitems__(indices) -> batch                  a finished batch, not a list of samples
    augmented(indices, epoch, seed) -> batch        the same with augmentation, for training; its randomness
                                                    depends only on (seed, epoch, index), see `derive_seeds`
"""

import gzip
import math
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from tandem.data.seeds import derive_seed, derive_seeds
from tandem.errors import ConfigError
from tandem.text import one_line

# IDX files, the format of MNIST.
#
# A file has a header (two zero bytes, type, number of dimensions, big-endian sizes), then the data.

IMAGES = 3
LABELS = 1
"""Number of dimensions of the two kinds of file."""
_UNSIGNED_BYTE = 8


class IdxNames(NamedTuple):
    train_images: str = "train-images-idx3-ubyte"
    train_labels: str = "train-labels-idx1-ubyte"
    evaluation_images: str = "t10k-images-idx3-ubyte"
    evaluation_labels: str = "t10k-labels-idx1-ubyte"


NAMES = IdxNames()


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read the uint8 tensor in `path`, which is gzipped if the name ends in .gz.

    Raises ConfigError with the file, what was expected and what was found.
    """
    content = _content(path)
    if len(content) < 4 or content[:2] != b"\0\0":
        raise _broken(path, "an IDX header", f"the bytes {bytes(content[:4]).hex(' ') or '(empty)'}")
    if content[2] != _UNSIGNED_BYTE or content[3] != dimensions:
        magic = _UNSIGNED_BYTE << 8 | dimensions
        expected = f"unsigned bytes in {dimensions} dimensions (magic {magic:#06x})"
        raise _broken(path, expected, f"magic {content[2] << 8 | content[3]:#06x}")
    header_bytes = 4 + 4 * dimensions
    if len(content) < header_bytes:
        raise _broken(path, f"a header of {header_bytes} bytes", f"{len(content)} bytes")
    shape = struct.unpack(f">{dimensions}I", content[4:header_bytes])
    expected_bytes = header_bytes + math.prod(shape)
    if len(content) != expected_bytes:
        size = " x ".join(map(str, shape))
        raise _broken(path, f"{expected_bytes} bytes for {size}", f"{len(content)} bytes")
    if math.prod(shape) == 0:
        raise _broken(path, "at least one element", f"{shape}")
    return torch.frombuffer(content, dtype=torch.uint8, offset=header_bytes).view(shape)


def write_idx(path: Path, tensor: Tensor) -> None:
    """Write a uint8 tensor to a file."""
    header = struct.pack(f">HBB{tensor.dim()}I", 0, _UNSIGNED_BYTE, tensor.dim(), *tensor.shape)
    with path.open("wb") as file:
        file.write(header)
        file.write(tensor.contiguous().numpy().tobytes())


def read_pair(folder: Path, images_name: str, labels_name: str, classes: int) -> tuple[Tensor, Tensor]:
    """Read uint8 images [N, H, W] and int64 labels [N] from two files in `folder`, raw or .gz.

    Raises ConfigError if their lengths differ or a label is not below `classes`.
    """
    images_path = _present(folder, images_name)
    labels_path = _present(folder, labels_name)
    if images_path is None or labels_path is None:
        raise ConfigError(f"{folder} has no {images_name if images_path is None else labels_name} (or .gz)")
    images = read_idx(images_path, IMAGES)
    labels = read_idx(labels_path, LABELS).long()
    if len(images) != len(labels):
        raise _broken(labels_path, f"{len(images)} labels, one for each image", f"{len(labels)}")
    if int(labels.max()) >= classes:
        raise _broken(labels_path, f"labels from 0 to {classes - 1}", f"a label {int(labels.max())}")
    return images, labels


def missing_idx(folder: Path) -> list[str]:
    """Return the standard names that are in `folder` neither raw nor gzipped."""
    return [name for name in NAMES if _present(folder, name) is None]


def _present(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _content(path: Path) -> bytearray | mmap.mmap:
    """Return the contents; a raw file is mapped, so that the ranks of a node share one copy."""
    try:
        if path.suffix == ".gz":
            return bytearray(gzip.decompress(path.read_bytes()))
        with path.open("rb") as file:
            # mmap refuses an empty file. The mapping is private and writable, since torch warns about
            # read-only memory.
            size = os.fstat(file.fileno()).st_size
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else bytearray()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _broken(path, "a complete gzip file", str(error)) from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error


def _broken(path: Path, expected: str, got: str) -> ConfigError:
    return ConfigError(f"{path} is damaged: expected {expected}, got {got}; download it again")


Augment = Callable[[Tensor, Tensor], Tensor]
"""(uint8 images [N, H, W, C], int64 keys [N]) -> uint8 images of the same shape."""


class Datasets(NamedTuple):
    """The training set and the evaluation sets of a task: datasets, not loaders.

    `evaluation` is one dataset, a dict of datasets ({"val": a, "test": b}, with scores such as val/accuracy),
    or None.
    """

    train: Any
    evaluation: Any


class TensorImages(Dataset[tuple[Tensor, Tensor]]):
    """Images in memory, uint8 [N, H, W] or [N, H, W, C], with int64 labels [N].

    Returns float32 [B, C, H, W], normalized with `mean` and `std` (one per channel, in units of 255). Only
    `augmented` applies `augment`.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        mean: Sequence[float],
        std: Sequence[float],
        augment: Augment | None = None,
    ) -> None:
        assert images.dtype == torch.uint8, images.dtype
        assert len(images) == len(labels), (len(images), len(labels))
        self.images = images if images.dim() == 4 else images.unsqueeze(-1)
        self.labels = labels
        self.augment = augment
        self._scale = torch.tensor([1 / (255 * s) for s in std]).view(1, -1, 1, 1)
        self._shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).view(1, -1, 1, 1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices, device=self.images.device)
        return self._normalized(self.images.index_select(0, chosen)), self.labels.index_select(0, chosen)

    def augmented(self, indices: Sequence[int] | Tensor, epoch: int, seed: int) -> tuple[Tensor, Tensor]:
        if self.augment is None:
            return self.__getitems__(indices)
        chosen = torch.as_tensor(indices)
        keys = derive_seeds(derive_seed(seed, epoch), chosen)
        images = self.augment(self.images.index_select(0, chosen), keys)
        return self._normalized(images), self.labels.index_select(0, chosen)

    def _normalized(self, images: Tensor) -> Tensor:
        # Without a memory format, the result would keep the strides of the permuted view.
        channels_first = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        # `cached_on_device` moves only images and labels to the GPU.
        if self._scale.device != images.device:
            self._scale, self._shift = self._scale.to(images.device), self._shift.to(images.device)
        return channels_first.mul_(self._scale).add_(self._shift)


class TensorRows(Dataset[tuple[Tensor, Tensor]]):
    """Inputs [N, ...] and targets [N, ...] in memory, returned unchanged."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        assert len(inputs) == len(targets), (len(inputs), len(targets))
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices, device=self.inputs.device)
        return self.inputs.index_select(0, chosen), self.targets.index_select(0, chosen)


def random_crop_flip(images: Tensor, keys: Tensor, padding: int = 4) -> Tensor:
    """Pad each image [N, H, W, C] with zeros, crop it at a random position, and flip half of them."""
    _, height, width, _ = images.shape
    padded = functional.pad(images, (0, 0, padding, padding, padding, padding))
    offsets = 2 * padding + 1
    # One key gives three independent numbers, from different bits.
    top = keys % offsets
    left = (keys >> 20) % offsets
    flip = (keys >> 40) % 2
    rows = torch.arange(height) + top.unsqueeze(1)
    columns = torch.arange(width).expand(len(keys), -1)
    columns = torch.where(flip.unsqueeze(1) == 1, columns.flip(1), columns) + left.unsqueeze(1)
    return padded[torch.arange(len(keys)).view(-1, 1, 1), rows.unsqueeze(2), columns.unsqueeze(1)]


def idx_datasets(folder: Path, mean: float, std: float, classes: int = 10) -> Datasets:
    """Read the four IDX files in `folder`. Raises ConfigError that names the invalid file."""
    names = NAMES
    train = read_pair(folder, names.train_images, names.train_labels, classes)
    evaluation = read_pair(folder, names.evaluation_images, names.evaluation_labels, classes)
    return Datasets(*(TensorImages(images, labels, [mean], [std]) for images, labels in (train, evaluation)))


def find_idx_folder(folders: Sequence[Path]) -> Path | None:
    """Return the first directory that has all four standard files, raw or .gz."""
    return next((folder for folder in folders if not missing_idx(folder)), None)


def torchvision_for(user: str) -> Any:
    """Return torchvision for `user`, such as "task mnist". Raises ConfigError if it cannot be imported.

    With a torch of a different build, importing torchvision raises RuntimeError.
    """
    try:
        import torchvision
    except (ImportError, RuntimeError, OSError) as error:
        how = install_vision(error) or "install the torchvision of the same build as torch"
        raise ConfigError(
            f"{user} needs torchvision, which cannot be imported ({one_line(error)}); {how}"
        ) from error
    return torchvision


def install_vision(error: BaseException) -> str:
    """Return the install command if an import failed because the extra `vision` is missing, else ""."""
    missing = isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] in (
        "PIL",
        "torchvision",
    )
    return "type: pip install 'tandem-train[vision]'" if missing else ""


def download(task: str, make: Callable[[], object]) -> None:
    """Run one of torchvision's downloads. Raises a one-line ConfigError with the reason."""
    try:
        make()
    except (OSError, RuntimeError) as error:  # URLError is an OSError
        raise ConfigError(
            f"cannot download the data of task {task} ({one_line(error)}); "
            "check the network, or put the files under --data-dir yourself"
        ) from error
