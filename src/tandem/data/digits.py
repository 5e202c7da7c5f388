"""The embedded set: pictures of digits drawn once with Pillow's built-in font, kept as IDX files.

Placement, sampling and noise are integer arithmetic on integers from a seeded generator, so that every node
draws the same bytes, whatever its processor and number of threads.
"""

import fcntl
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tandem.data import idx
from tandem.data.seeds import derive_seed
from tandem.errors import ConfigError

TRAIN_SAMPLES, EVALUATION_SAMPLES = 60_000, 10_000
SIDE = 28
"""Pixels a side."""
_GLYPH_SIDE = 112  # drawn four times as large, and sampled from there
_GLYPH_STYLES = ((64, 0), (72, 0), (80, 0), (72, 2), (80, 2), (64, 4))  # font size, extra stroke
_CHUNK = 5_000
_ONE = 1 << 12  # 1.0 in fixed point
_TURN = 20  # degrees, either way


def prepare_digits(folder: Path) -> None:
    """Draw the four files into `folder` unless they are there; safe with many processes at once."""
    if not idx.missing(folder):
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f".{folder.name}.lock")):
            if idx.missing(folder):
                _draw_into(folder)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{folder} cannot be written ({reason}): give another --data-dir") from error


def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """`count` pictures, uint8 [count, 28, 28], and their labels, uint8 [count]."""
    generator = torch.Generator().manual_seed(derive_seed(seed))
    glyphs = _glyphs()
    images, labels = torch.empty(count, SIDE, SIDE, dtype=torch.uint8), torch.empty(count, dtype=torch.uint8)
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        labels[start:stop] = torch.randint(10, (stop - start,), generator=generator, dtype=torch.uint8)
        images[start:stop] = _pictures(glyphs, labels[start:stop].int(), generator)
    return images, labels


def _draw_into(folder: Path) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        partial.chmod(0o755)
        for seed, count, names in (
            (0, TRAIN_SAMPLES, (idx.NAMES.train_images, idx.NAMES.train_labels)),
            (1, EVALUATION_SAMPLES, (idx.NAMES.evaluation_images, idx.NAMES.evaluation_labels)),
        ):
            for name, tensor in zip(names, draw(count, seed), strict=True):
                idx.write_idx(partial / name, tensor)
        try:
            partial.rename(folder)
        except OSError:  # the folder is there: finished by someone whom the lock did not reach, or incomplete
            if idx.missing(folder):
                for name in idx.NAMES:
                    os.replace(partial / name, folder / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Wait for whoever is drawing. Where the file system has no locks, two may draw, and one rename wins."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def _glyphs() -> Tensor:
    """Each digit in each style, centred: uint8 [10 * styles, 112, 112]."""
    from PIL import Image, ImageDraw, ImageFont

    drawn = []
    for digit in "0123456789":
        for size, stroke in _GLYPH_STYLES:
            picture = Image.new("L", (_GLYPH_SIDE, _GLYPH_SIDE))
            ImageDraw.Draw(picture).text(
                (_GLYPH_SIDE // 2, _GLYPH_SIDE // 2),
                digit,
                fill=255,
                font=ImageFont.load_default(size),
                anchor="mm",
                stroke_width=stroke,
            )
            drawn.append(torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8))
    stacked = torch.stack(drawn).view(-1, _GLYPH_SIDE, _GLYPH_SIDE)
    stacked[:, [0, -1]] = 0  # places outside a glyph are sampled from its border
    stacked[:, :, [0, -1]] = 0
    return _blurred(stacked)


def _blurred(glyphs: Tensor) -> Tensor:
    """A 3 x 3 box, which keeps edges soft when every fourth pixel is taken."""
    wide = glyphs.int()
    wide[:, 1:-1] = (wide[:, :-2] + wide[:, 1:-1] + wide[:, 2:]) // 3
    wide[:, :, 1:-1] = (wide[:, :, :-2] + wide[:, :, 1:-1] + wide[:, :, 2:]) // 3
    return wide.to(torch.uint8)


def _pictures(glyphs: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """For each label a picture [SIDE, SIDE], randomly styled, turned, scaled, sheared, moved, dimmed."""
    count = len(labels)

    def uniform(low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, (count, 1, 1), generator=generator, dtype=torch.int32)

    style = labels.view(-1, 1, 1) * len(_GLYPH_STYLES) + uniform(0, len(_GLYPH_STYLES) - 1)
    turn = uniform(-_TURN, _TURN)
    cosine, sine = _turned(turn, math.cos), _turned(turn, math.sin)
    scale_x, scale_y, shear = uniform(3_200, 4_900), uniform(3_200, 4_900), uniform(-700, 700)
    # Glyph pixels for each picture pixel, from the centre outwards: scale and shear of the turned grid.
    step = _GLYPH_SIDE // SIDE
    grid = (torch.arange(SIDE, dtype=torch.int32) * 2 - (SIDE - 1)) * step  # half pixels
    row, column = grid.view(1, -1, 1), grid.view(1, 1, -1)
    xx, xy = scale_x * cosine // _ONE, (scale_x * sine + shear * cosine) // _ONE
    yx, yy = -scale_y * sine // _ONE, scale_y * cosine // _ONE
    x = ((column * xx + row * xy) >> 13) + (_GLYPH_SIDE // 2 + uniform(-10, 10))
    y = ((column * yx + row * yy) >> 13) + (_GLYPH_SIDE // 2 + uniform(-10, 10))
    place = style * _GLYPH_SIDE + y.clamp_(0, _GLYPH_SIDE - 1)
    place = place.mul_(_GLYPH_SIDE).add_(x.clamp_(0, _GLYPH_SIDE - 1))
    ink = glyphs.flatten().index_select(0, place.flatten()).view(count, SIDE, SIDE).int()
    noise = torch.randint(64, (count, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    return ((ink * uniform(140, 255) >> 8) + noise).clamp_(0, 255).to(torch.uint8)


def _turned(degrees: Tensor, function: Callable[[float], float]) -> Tensor:
    table = torch.tensor([round(function(math.radians(d)) * _ONE) for d in range(-_TURN, _TURN + 1)])
    return table.int()[(degrees + _TURN).long()]
