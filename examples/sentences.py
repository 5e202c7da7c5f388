"""Lines of any length: batches of much the same length, padded, and a mean over their characters.

    tandem launch --nodes 2 --task examples/sentences.py:Sentences --optimizer adamw --lr 0.003
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from tandem import Datasets

UNCOUNTED = -100


@dataclass
class Sentences:
    width: int = 64
    lines: int = 1_000

    def build_model(self):
        return nn.Sequential(nn.Embedding(128, self.width), Forward(self.width), nn.Linear(self.width, 128))

    def build_datasets(self):
        text = Path(argparse.__file__).read_text(encoding="ascii", errors="replace")
        lines = [line.strip().encode("ascii", errors="replace") for line in text.splitlines()]
        lines = [torch.tensor(list(line)) for line in lines if len(line) > 1]
        return Datasets(lines[: self.lines], lines[self.lines : self.lines + 200])

    def sample_lengths(self, train):
        return [len(line) for line in train]

    def collate(self, lines):
        words = pad_sequence([line[:-1] for line in lines], batch_first=True)
        return words, pad_sequence([line[1:] for line in lines], batch_first=True, padding_value=UNCOUNTED)

    def loss(self, model, batch):
        words, targets = batch
        return nn.functional.cross_entropy(model(words).flatten(0, 1), targets.flatten())

    def weight(self, batch):
        return (batch[1] != UNCOUNTED).sum()


class Forward(nn.Module):
    """What has been read so far, [B, T, width]."""

    def __init__(self, width):
        super().__init__()
        self.memory = nn.GRU(width, width, batch_first=True)

    def forward(self, words):
        return self.memory(words)[0]
