"""The tasks that gpu_check.py trains, and the same models in bare loops on one GPU, without a framework.

    python benchmarks/gpu_tasks.py Resnet50 --scale full --device cuda [--compile]

prints the milliseconds per step of a bare loop. The loop has every optimization that people usually write by
hand: bf16 by autocast, channels last, and a fused optimizer. It uses one batch that stays on the device, so
it never waits for data. All step times are measured between two steps of a run. The host waits for the device
only at these two.
"""

import argparse
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from tandem.data.datasets import Datasets, TensorRows

TIMES = "GPU_CHECK_TIMES"
"""Names the file that a task of tandem's writes its milliseconds per step to."""


class Scale(NamedTuple):
    """The amount of computation: batch sizes, image size, text length, and the model's width and depth."""

    pictures: int
    side: int
    texts: int
    length: int
    width: int
    depth: int
    words: int
    first: int  # the steps between which is measured
    last: int


SCALES = {
    "full": Scale(128, 224, 16, 1024, 768, 12, 50304, 40, 120),
    "tiny": Scale(4, 32, 2, 16, 32, 2, 64, 2, 5),
}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass
class Timed:
    """A task that records the duration of its steps between two steps, by default those of its scale."""

    scale: str = "full"
    first: int = 0
    last: int = 0
    began = 0.0

    @property
    def of(self) -> Scale:
        return SCALES[self.scale]

    def after_step(self, model: nn.Module, step: int) -> None:
        first = self.first or self.of.first
        last = self.last or self.of.last
        if step == first:
            _wait()
            self.began = time.perf_counter()
        elif step == last and TIMES in os.environ:
            _wait()
            took = (time.perf_counter() - self.began) / (last - first)
            Path(os.environ[TIMES]).write_text(str(1e3 * took))

    @property
    def batch_size(self) -> int:
        raise NotImplementedError

    def rows(self, count: int) -> TensorRows:
        raise NotImplementedError

    def build_datasets(self) -> Datasets:
        return Datasets(self.rows(4 * self.batch_size), None)


class Resnet50(Timed):
    """Images travel as bytes and are normalized on the device."""

    @property
    def batch_size(self) -> int:
        return self.of.pictures

    def build_model(self) -> nn.Module:
        from torchvision.models import resnet50  # type: ignore[import-untyped]

        model: nn.Module = resnet50()
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        fused = next(model.parameters()).is_cuda
        return torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=5e-5, fused=fused)

    def rows(self, count: int) -> TensorRows:
        pictures = torch.randint(256, (count, 3, self.of.side, self.of.side), dtype=torch.uint8)
        return TensorRows(pictures, torch.randint(1000, (count,)))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        pictures = batch[0].float().sub_(118).div_(58)
        if pictures.is_cuda:
            pictures = pictures.contiguous(memory_format=torch.channels_last)
        return functional.cross_entropy(model(pictures), batch[1])


class Block(nn.Module):
    """Attention and a layer of 4 times the width, each after a norm, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.into(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.wide(self.second(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """[B, T] tokens -> [B, T, words]; the output shares the embedding's weights."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.tokens = nn.Embedding(scale.words, scale.width)
        self.places = nn.Embedding(scale.length, scale.width)
        heads = max(1, scale.width // 64)
        self.blocks = nn.Sequential(*(Block(scale.width, heads) for _ in range(scale.depth)))
        self.norm, self.head = nn.LayerNorm(scale.width), nn.Linear(scale.width, scale.words, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


class Gpt124m(Timed):
    """GPT-2 small without dropout, on random tokens."""

    @property
    def batch_size(self) -> int:
        return self.of.texts

    def build_model(self) -> nn.Module:
        return Transformer(self.of)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        fused = next(model.parameters()).is_cuda
        return torch.optim.AdamW(model.parameters(), 6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)

    def rows(self, count: int) -> TensorRows:
        tokens = torch.randint(self.of.words, (count, self.of.length + 1))
        return TensorRows(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@dataclass
class Conv:
    """Operations whose kernels may sum in any order (convolutions, products), dropout and batch norm."""

    width: int = 64

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(3, self.width, 3, padding=1, bias=False), nn.BatchNorm2d(self.width), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Conv2d(self.width, self.width, 3, padding=1), nn.ReLU(), nn.Dropout(0.2)),
            *(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * self.width, 10)),
        )

    def build_datasets(self) -> Datasets:
        chance = torch.Generator().manual_seed(0)
        pictures = torch.randn(1024, 3, 16, 16, generator=chance)
        return Datasets(TensorRows(pictures, torch.randint(10, (1024,), generator=chance)), None)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])


class BySample(Dataset[Any]):
    """Rows that are read one at a time, so that loader processes have work."""

    def __init__(self, rows: TensorRows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows.inputs[index], self.rows.targets[index]


class ConvBySample(Conv):
    def build_datasets(self) -> Datasets:
        train: Any = super().build_datasets().train
        return Datasets(BySample(train), None)


class Frozen(Conv):
    """Its first convolution is frozen in the first epoch."""

    def freeze(self, model: nn.Module, epoch: int) -> None:
        next(model.parameters()).requires_grad_(epoch > 0)


TASKS: dict[str, Callable[[str], Timed]] = {"Resnet50": Resnet50, "Gpt124m": Gpt124m}


def bare(name: str, scale: str, device: torch.device, compiled: bool) -> float:
    """Return the milliseconds per step of a hand-written loop."""
    task = TASKS[name](scale)
    model: Any = task.build_model().to(device)
    if name == "Resnet50" and device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)
    optimizer: Any = task.build_optimizer(model)  # type: ignore[attr-defined]
    model = torch.compile(model) if compiled else model
    batch = [part.to(device) for part in task.rows(task.batch_size).__getitems__(range(task.batch_size))]
    half = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
    for step in range(task.of.last):
        if step == task.of.first:
            _wait()
            began = time.perf_counter()
        with half:
            loss = task.loss(model, batch)  # type: ignore[attr-defined]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    _wait()
    return 1e3 * (time.perf_counter() - began) / (task.of.last - task.of.first)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=TASKS)
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--compile", action="store_true")
    asked = parser.parse_args()
    print(bare(asked.name, asked.scale, asked.device, asked.compile))
