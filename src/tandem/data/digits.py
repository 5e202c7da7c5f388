"""The built-in dataset: images of digits, drawn once from lines and arcs and stored as IDX files.

Strokes, placement, sampling and noise use integer arithmetic on integers from a seeded generator. Every node
therefore draws the same bytes, regardless of its processor and number of threads.
"""

import fcntl
import functools
import itertools
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tandem.data import datasets
from tandem.data.seeds import derive_seed
from tandem.errors import ConfigError

TRAIN_SAMPLES = 60_000
EVALUATION_SAMPLES = 10_000
SIDE = 28
"""Width and height of an image in pixels."""
_GLYPH_SIDE = 112  # drawn four times as large, then sampled
_GLYPH_STYLES = ((46, 5), (52, 6), (58, 6), (52, 10), (58, 11), (46, 13))  # (height, stroke width)
_FINE = 8  # subdivisions of a glyph's pixel for placing strokes
_CHUNK = 5_000
_ONE = 1 << 12  # 1.0 in fixed point
_TURN = 20  # degrees, in either direction


def _arc(x: int, y: int, radius_x: int, radius_y: int, start: int, stop: int) -> list[tuple[float, float]]:
    """Return the corners of an arc around (x, y), in degrees clockwise from the right."""
    turns = [math.radians(degrees) for degrees in range(start, stop + 1, 10)]
    return [(x + radius_x * math.cos(turn), y + radius_y * math.sin(turn)) for turn in turns]


# The strokes of each digit, each as a list of corners, in hundredths of the digit's height from its center.
_STROKES: tuple[list[list[tuple[float, float]]], ...] = (
    [_arc(0, 0, 30, 50, 0, 360)],
    [[(-20, -32), (3, -50), (3, 50)]],
    [[*_arc(0, -23, 28, 27, 190, 400), (-29, 50), (29, 50)]],
    [_arc(0, -26, 25, 24, 200, 450), _arc(0, 24, 29, 26, 270, 520)],
    [[(14, 50), (14, -50), (-29, 24), (31, 24)]],
    [[(24, -50), (-20, -50), (-24, 0), *_arc(0, 18, 29, 32, 220, 520)]],
    [_arc(0, 20, 28, 30, 0, 360), _arc(22, 20, 50, 70, 180, 270)],
    [[(-28, -50), (28, -50), (-9, 50)]],
    [_arc(0, -26, 24, 24, 0, 360), _arc(0, 24, 29, 26, 0, 360)],
    [_arc(0, -20, 28, 30, 0, 360), _arc(-22, -20, 50, 70, 0, 90)],
)


def prepare_digits(folder: Path) -> None:
    """Draw the four files into `folder` unless they exist; safe with many concurrent processes."""
    if not datasets.missing_idx(folder):
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f".{folder.name}.lock")):
            if datasets.missing_idx(folder):
                _draw_into(folder)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot write {folder} ({reason}); use another --data-dir") from error


def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw `count` images, uint8 [count, 28, 28], and their labels, uint8 [count]."""
    generator = torch.Generator().manual_seed(derive_seed(seed))
    glyphs = _glyphs()
    images = torch.empty(count, SIDE, SIDE, dtype=torch.uint8)
    labels = torch.empty(count, dtype=torch.uint8)
    # Other chunks would change the images, because the numbers for a chunk are drawn together.
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        labels[start:stop] = torch.randint(10, (stop - start,), generator=generator, dtype=torch.uint8)
        images[start:stop] = _pictures(glyphs, labels[start:stop].int(), generator)
    return images, labels


def _draw_into(folder: Path) -> None:
    # rename() works only inside a file system, so this is next to the target.
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        # mkdtemp allows only its owner, and other users may share the data directory.
        partial.chmod(0o755)
        for seed, count, names in (
            (0, TRAIN_SAMPLES, (datasets.NAMES.train_images, datasets.NAMES.train_labels)),
            (1, EVALUATION_SAMPLES, (datasets.NAMES.evaluation_images, datasets.NAMES.evaluation_labels)),
        ):
            for name, tensor in zip(names, draw(count, seed), strict=True):
                datasets.write_idx(partial / name, tensor)
        try:
            partial.rename(folder)
        except OSError:  # the directory exists: finished by a process outside the lock, or incomplete
            if datasets.missing_idx(folder):
                for name in datasets.NAMES:
                    os.replace(partial / name, folder / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Wait for another process that draws. Without file locks, two may draw, and one rename wins."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


@functools.cache
def _glyphs() -> Tensor:
    """Draw each digit in each style, centered: uint8 [10 * styles, 112, 112]."""
    glyphs = torch.zeros(len(_STROKES) * len(_GLYPH_STYLES), _GLYPH_SIDE, _GLYPH_SIDE, dtype=torch.uint8)
    for i, (strokes, (height, width)) in enumerate(itertools.product(_STROKES, _GLYPH_STYLES)):
        for stroke in strokes:
            corners = [(round(x * height * _FINE / 100), round(y * height * _FINE / 100)) for x, y in stroke]
            for start, stop in itertools.pairwise(corners):
                _draw_line(glyphs[i], start, stop, width * _FINE // 2)
    return _blurred(glyphs)


def _draw_line(glyph: Tensor, start: tuple[int, int], stop: tuple[int, int], radius: int) -> None:
    """Ink the pixels with centers within `radius` of a line; all in 1/_FINE pixel from the middle."""
    columns, rows = (_pixels(*ends, radius) for ends in zip(start, stop, strict=True))
    center = (torch.arange(_GLYPH_SIDE) * 2 - (_GLYPH_SIDE - 1)) * (_FINE // 2)
    x = center[columns].view(1, -1) - start[0]
    y = center[rows].view(-1, 1) - start[1]
    along_x = stop[0] - start[0]
    along_y = stop[1] - start[1]
    length = along_x**2 + along_y**2  # squared; the distances below are squared and multiplied by its square
    nearest = (x * along_x + y * along_y).clamp_(0, length)
    away = (x * length - nearest * along_x) ** 2 + (y * length - nearest * along_y) ** 2
    glyph[rows, columns].masked_fill_(away <= radius**2 * length**2, 255)


def _pixels(start: int, stop: int, radius: int) -> slice:
    """Return the rows (or columns) within `radius` of the range between two positions."""
    first, last = (
        (end // _FINE + _GLYPH_SIDE // 2) for end in (min(start, stop) - radius, max(start, stop) + radius)
    )
    return slice(first, last + 1)


def _blurred(glyphs: Tensor) -> Tensor:
    """Apply a 3 x 3 box filter, which keeps edges soft when every fourth pixel is sampled."""
    wide = glyphs.int()
    wide[:, 1:-1] = (wide[:, :-2] + wide[:, 1:-1] + wide[:, 2:]) // 3
    wide[:, :, 1:-1] = (wide[:, :, :-2] + wide[:, :, 1:-1] + wide[:, :, 2:]) // 3
    return wide.to(torch.uint8)


def _pictures(glyphs: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Draw an image [SIDE, SIDE] per label, with random style, rotation, scale, shear, offset, contrast."""
    count = len(labels)

    def uniform(low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, (count, 1, 1), generator=generator, dtype=torch.int32)

    style = labels.view(-1, 1, 1) * len(_GLYPH_STYLES) + uniform(0, len(_GLYPH_STYLES) - 1)
    turn = uniform(-_TURN, _TURN)
    cosine = _turned(turn, math.cos)
    sine = _turned(turn, math.sin)
    scale_x = uniform(3_200, 4_900)
    scale_y = uniform(3_200, 4_900)
    shear = uniform(-700, 700)
    # Glyph pixels per image pixel, from the center outward: scale and shear of the rotated grid.
    step = _GLYPH_SIDE // SIDE
    grid = (torch.arange(SIDE, dtype=torch.int32) * 2 - (SIDE - 1)) * step  # in half pixels
    row = grid.view(1, -1, 1)
    column = grid.view(1, 1, -1)
    xx = scale_x * cosine // _ONE
    xy = (scale_x * sine + shear * cosine) // _ONE
    yx = -scale_y * sine // _ONE
    yy = scale_y * cosine // _ONE
    # The products have 12 bits of fraction (_ONE) and count half pixels, hence 13.
    x = ((column * xx + row * xy) >> 13) + (_GLYPH_SIDE // 2 + uniform(-10, 10))
    y = ((column * yx + row * yy) >> 13) + (_GLYPH_SIDE // 2 + uniform(-10, 10))
    pixel = style * _GLYPH_SIDE + y.clamp_(0, _GLYPH_SIDE - 1)
    pixel = pixel.mul_(_GLYPH_SIDE).add_(x.clamp_(0, _GLYPH_SIDE - 1))
    ink = glyphs.flatten().index_select(0, pixel.flatten()).view(count, SIDE, SIDE).int()
    noise = torch.randint(64, (count, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    return ((ink * uniform(140, 255) >> 8) + noise).clamp_(0, 255).to(torch.uint8)


def _turned(degrees: Tensor, function: Callable[[float], float]) -> Tensor:
    table = torch.tensor([round(function(math.radians(d)) * _ONE) for d in range(-_TURN, _TURN + 1)])
    return table.int()[(degrees + _TURN).long()]
