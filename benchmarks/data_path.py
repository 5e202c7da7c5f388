"""Measure samples per second through the data loaders alone, without a model: tandem, torch and torchvision.

    python benchmarks/data_path.py [--rounds 7] [--seconds 1] [--json benchmarks/results/data_path.json]

The 28 x 28 images are those of the digits task, generated on this machine, in batches of 64. They are read as
in tutorials (torchvision's MNIST with ToTensor and Normalize, in torch's DataLoader), as a TensorDataset that
was normalized in advance, and by tandem. The photographs are generated JPEGs of 320 x 240. They are read by
torchvision's ImageFolder in torch's DataLoader, and by the image-folder task, with the same number of workers
and to normalized floats. "Own data" is a typical map-style dataset that returns one sample per index, in
torch's DataLoader on both sides. It shows what tandem adds per sample, to derive its randomness from the step
and not from the worker.

A reader has one thread, like a rank of two on two cores, and so does each worker. Every round runs each
reader once, and starts with a different one. A measurement starts when the workers are running. Ratios
compare readers of the same round, and the result is the median over rounds. Without workers, the times are
CPU times, which equal wall times on an idle machine; with workers, they are wall times.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from table import Row, finish
from tandem.config.slices import DataConfig
from tandem.data.digits import prepare_digits
from tandem.data.kinds import training_data
from tandem.data.source import BatchReader
from tandem.tasks.digits import Digits
from tandem.tasks.image_folder import ImageFolder
from tandem.tasks.normalized import normalized

BATCH, PHOTOGRAPHS = 64, 16  # samples of a batch
LEAST_BATCHES = 8
CLASSES, OF_EACH = 5, 32
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DATA = Path(tempfile.gettempdir()) / "tandem-benchmark-data"

Batches = Iterator[tuple[Tensor, Tensor]]


class OwnData(Dataset[tuple[Tensor, Tensor]]):
    """A typical map-style dataset that returns one sample per index, unknown to any library."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


def digits_folder(folder: Path) -> Path:
    """Generate the digits task's files once, where torchvision.datasets.MNIST also looks for its own."""
    prepare_digits(folder / "digits")
    seen = folder / "MNIST" / "raw"
    if not seen.exists():
        seen.parent.mkdir(exist_ok=True)
        seen.symlink_to(Path("..") / "digits")
    return folder


def photographs_folder(folder: Path) -> Path:
    """Generate train/ and val/ with CLASSES directories of OF_EACH JPEGs: soft colors with an ellipse."""
    generator = torch.Generator().manual_seed(0)
    for part in ("train", "val"):
        for number in range(CLASSES * OF_EACH):
            path = folder / part / str(number % CLASSES) / f"{number:04}.jpg"
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            colors = torch.randint(256, (12, 16, 3), dtype=torch.uint8, generator=generator)
            picture = Image.fromarray(colors.numpy()).resize((320, 240), Image.Resampling.BICUBIC)
            x, y = (int(place) for place in torch.randint(20, 140, (2,), generator=generator))
            ImageDraw.Draw(picture).ellipse((x, y, x + 100, y + 80), fill=(40 * (number % CLASSES), 90, 160))
            picture.save(path, quality=90)
    return folder


def again(loader: DataLoader[Any]) -> Batches:
    """Read epoch after epoch, like a training loop."""
    while True:
        yield from loader


def mnist(folder: Path, workers: int) -> Batches:
    """Read MNIST as in tutorials."""
    from torchvision import datasets, transforms

    steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    data = datasets.MNIST(str(folder), train=True, transform=transforms.Compose(steps))
    return again(DataLoader(data, BATCH, shuffle=True, num_workers=workers))


def image_folder(folder: Path, workers: int) -> Batches:
    from torchvision import datasets, transforms

    steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    steps.append(transforms.Normalize(MEAN, STD))
    data = datasets.ImageFolder(str(folder / "train"), transforms.Compose(steps))
    return again(DataLoader(data, PHOTOGRAPHS, shuffle=True, num_workers=workers, drop_last=True))


def by_tandem(data: Any, batch_size: int, workers: int = 0) -> Batches:
    """Return the batches that a single rank of a run trains on."""
    config = DataConfig(batch_size=batch_size, workers=workers)
    reader = BatchReader(config, seed=0, rank=0, world_size=1, collate=None, device=torch.device("cpu"))
    for micro_batches in training_data(data, reader, None).steps(0, 1_000_000_000):
        yield from micro_batches


def photographs_by_tandem(data: Any, workers: int) -> Batches:
    """Include the normalization by the task's model, to compare floats with floats."""
    floats = normalized(nn.Identity(), MEAN, STD)
    return ((floats(images), labels) for images, labels in by_tandem(data, PHOTOGRAPHS, workers))


class Pair(NamedTuple):
    """A row: which two of `readers` are compared, and the target ratio."""

    name: str
    mine: str
    control: str
    least: float | None = None


PAIRS = (
    Pair("28 x 28: tandem, digits", "digits", "torchvision's MNIST, no workers", 100),
    Pair("28 x 28: tandem, digits", "digits", "torchvision's MNIST, 2 workers"),
    Pair("28 x 28: tandem, TensorDataset", "tensors", "torchvision's MNIST, no workers", 100),
    Pair("28 x 28: tandem, TensorDataset", "tensors", "TensorDataset in torch's DataLoader"),
    Pair("own data: tandem, no workers", "own 0", "own data in torch's DataLoader, no workers", 0.95),
    Pair("own data: tandem, 2 workers", "own 2", "own data in torch's DataLoader, 2 workers", 0.95),
    Pair("image folder: tandem, no workers", "folder 0", "torchvision's ImageFolder, no workers", 1),
    Pair("image folder: tandem, 2 workers", "folder 2", "torchvision's ImageFolder, 2 workers", 1),
)


def readers(folder: Path) -> dict[str, Callable[[], Batches]]:
    pictures = Digits(digits_folder(folder)).build_datasets().train
    photographs = photographs_folder(folder / "photographs")
    task = ImageFolder(photographs).build_datasets().train
    rows = TensorDataset(*pictures.__getitems__(torch.arange(len(pictures))))
    own = OwnData(*rows.tensors)
    return {
        "digits": lambda: by_tandem(pictures, BATCH),
        "tensors": lambda: by_tandem(rows, BATCH),
        "TensorDataset in torch's DataLoader": lambda: again(DataLoader(rows, BATCH, shuffle=True)),
        "own 0": lambda: by_tandem(own, BATCH),
        "own 2": lambda: by_tandem(own, BATCH, 2),
        "own data in torch's DataLoader, no workers": lambda: again(DataLoader(own, BATCH, shuffle=True)),
        "own data in torch's DataLoader, 2 workers": lambda: again(
            DataLoader(own, BATCH, shuffle=True, num_workers=2)
        ),
        "torchvision's MNIST, no workers": lambda: mnist(folder, 0),
        "torchvision's MNIST, 2 workers": lambda: mnist(folder, 2),
        "folder 0": lambda: photographs_by_tandem(task, 0),
        "folder 2": lambda: photographs_by_tandem(task, 2),
        "torchvision's ImageFolder, no workers": lambda: image_folder(photographs, 0),
        "torchvision's ImageFolder, 2 workers": lambda: image_folder(photographs, 2),
    }


class Pace(NamedTuple):
    """Samples per second, by wall time and by the CPU time of this process."""

    clock: float
    cpu: float


def pace(batches: Batches, seconds: float) -> Pace:
    """Measure for `seconds`, after as many batches as the workers load in advance."""
    for _ in islice(batches, LEAST_BATCHES):
        pass
    began, cpu, samples, number = time.perf_counter(), time.process_time(), 0, 0
    for inputs, _labels in batches:
        samples, number = samples + len(inputs), number + 1
        taken = time.perf_counter() - began
        if taken >= seconds and number >= LEAST_BATCHES:
            break
    return Pace(samples / taken, samples / (time.process_time() - cpu))


def measure(folder: Path, rounds: int, seconds: float) -> list[Row]:
    torch.set_num_threads(1)
    everybody = readers(folder)
    for pair in PAIRS:
        first, other = (next(everybody[name]())[0].shape for name in (pair.mine, pair.control))
        if first != other:
            raise SystemExit(f"{pair.name}: {pair.mine} reads {tuple(first)}, {pair.control} {tuple(other)}")
    found: dict[str, list[Pace]] = {name: [] for name in everybody}
    names = list(everybody)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(pace(everybody[name](), seconds))
            print(f"round {number + 1}: {name} {found[name][-1].clock:,.0f}/s", file=sys.stderr, flush=True)
    return [_row(pair, found[pair.mine], found[pair.control]) for pair in PAIRS]


def _row(pair: Pair, of_mine: list[Pace], of_control: list[Pace]) -> Row:
    by = "clock" if pair.control.endswith("2 workers") else "cpu"
    mine, control = ([getattr(each, by) for each in paces] for paces in (of_mine, of_control))
    ratio = statistics.median(a / b for a, b in zip(mine, control, strict=True))
    told, target, is_met = f"{ratio:.0f} times" if ratio >= 20 else f"{ratio:.2f} times", "", None
    if pair.least is not None:
        target, is_met = f"at least {pair.least:g} times", ratio >= pair.least
    return Row(
        pair.name,
        len(mine),
        _spread(mine),
        f"{pair.control} {_spread(control)}",
        told,
        target,
        is_met,
        len(control),
    )


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f}/s ({min(values):,.0f} to {max(values):,.0f})"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--data-dir", type=Path, default=DATA, help=f"[{DATA}]")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    asked = parser.parse_args()
    table = measure(asked.data_dir, asked.rounds, asked.seconds)
    return finish(table, asked.json)


if __name__ == "__main__":
    sys.exit(main())
