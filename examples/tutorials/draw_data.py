"""Draws small data in the forms that the tutorials download: MNIST's files, and a folder of pictures.

python examples/tutorials/draw_data.py data [--digits 2400] [--pictures 24]

data/MNIST/raw/...          what torchvision.datasets.MNIST("data") reads
data/train/CLASS/*.png      what torchvision.datasets.ImageFolder("data/train") reads; data/val as well
"""

import argparse
import math
import random
from pathlib import Path

from PIL import Image, ImageDraw

from tandem.data.datasets import NAMES, write_idx
from tandem.data.digits import draw

PETALS = {"daisy": 12, "rose": 5, "sunflower": 20, "thistle": 40, "tulip": 3}
COLORS = {"daisy": "white", "rose": "red", "sunflower": "gold", "thistle": "purple", "tulip": "pink"}
SIDE = 48  # pixels


def draw_digits(folder: Path, count: int) -> None:
    """`count` pictures to train with and a fifth of that to test with, in MNIST's four files."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, pictures, labels, size in (
        (0, NAMES.train_images, NAMES.train_labels, count),
        (1, NAMES.evaluation_images, NAMES.evaluation_labels, count // 5),
    ):
        for name, tensor in zip((pictures, labels), draw(size, seed), strict=True):
            write_idx(folder / name, tensor)


def flower(name: str, chance: random.Random) -> Image.Image:
    """One flower at a random place, in a random size, turned, on a green ground."""
    picture = Image.new("RGB", (SIDE, SIDE), (chance.randrange(60), 90 + chance.randrange(60), 40))
    pen, petals = ImageDraw.Draw(picture), PETALS[name]
    x, y = chance.uniform(18, 30), chance.uniform(18, 30)
    reach, turn = chance.uniform(9, 15), chance.uniform(0, math.pi)
    for petal in range(petals):
        angle = turn + 2 * math.pi * petal / petals
        end = x + reach * math.cos(angle), y + reach * math.sin(angle)
        pen.line((x, y, *end), fill=COLORS[name], width=max(1, round(24 / petals)))
    pen.ellipse((x - 3, y - 3, x + 3, y + 3), fill="brown")
    return picture


def draw_pictures(folder: Path, count: int) -> None:
    """`count` pictures of each class to train with, and a quarter of that to look at afterwards."""
    chance = random.Random(0)
    for part, size in (("train", count), ("val", count // 4)):
        for name in PETALS:
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for number in range(size):
                flower(name, chance).save(folder / part / name / f"{number:03}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--digits", type=int, default=2400)
    parser.add_argument("--pictures", type=int, default=24, help="of each of the five classes")
    options = parser.parse_args()
    draw_digits(options.folder / "MNIST" / "raw", options.digits)
    draw_pictures(options.folder, options.pictures)
