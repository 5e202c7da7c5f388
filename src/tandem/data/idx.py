"""IDX files, the format of MNIST.

A file has a header (two zero bytes, type, number of dimensions, big-endian sizes), then the data.
"""

import gzip
import math
import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.errors import ConfigError

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


def missing(folder: Path) -> list[str]:
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
