"""A small language model of characters, with settings of its own.

    tandem launch --task examples/char_lm.py:CharLM --optimizer adamw --lr 0.003 --batch-size 48 --steps 300
    tandem launch --task examples/char_lm.py:CharLM --task.text my_book.txt --task.context 128

Without `text` it learns the source of some modules of Python's standard library, which is there without any
download. It shows: fields, a dataset that answers for a whole batch, and a loss with further numbers.
"""

import argparse
import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tandem import Datasets

CHARACTERS = 128  # ASCII; all else becomes "?"


class Windows:
    """Pieces of `context` + 1 characters in a row, as (inputs, targets), both int64 [B, context]."""

    def __init__(self, characters: Tensor, context: int) -> None:
        self.characters, self.context = characters, context

    def __len__(self) -> int:
        return max(0, (len(self.characters) - 1) // self.context)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        starts = torch.as_tensor(indices).unsqueeze(1) * self.context
        pieces = self.characters[starts + torch.arange(self.context + 1)].long()
        return pieces[:, :-1], pieces[:, 1:]


class CharModel(nn.Module):
    """Characters [B, T] -> logits [B, T, CHARACTERS]; each place sees only those before it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, width)
        self.memory = nn.GRU(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, characters: Tensor) -> Tensor:
        remembered, _ = self.memory(self.embedding(characters))
        logits: Tensor = self.head(remembered)
        return logits


@dataclass
class CharLM:
    """Predict the next character of `text` from up to `context` before it."""

    text: Path | None = None
    context: int = 32
    width: int = 96
    layers: int = 1

    def build_model(self) -> nn.Module:
        return CharModel(self.width, self.layers)

    def build_datasets(self) -> Datasets:
        sources = [self.text] if self.text else [Path(module.__file__ or "") for module in (argparse, typing)]
        text = "\n".join(source.read_text(encoding="utf-8") for source in sources)
        characters = torch.frombuffer(bytearray(text.encode("ascii", errors="replace")), dtype=torch.uint8)
        cut = len(characters) * 9 // 10
        return Datasets(Windows(characters[:cut], self.context), Windows(characters[cut:], self.context))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        inputs, targets = batch
        logits = model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        correct = (logits.argmax(dim=2) == targets).sum()
        characters = torch.full_like(correct, targets.numel())
        bits = loss.detach() * characters / math.log(2)
        return loss, {"accuracy": (correct, characters), "bits_per_character": (bits, characters)}
