import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.distributed import get_world_size
from torch.nn import functional

import tandem
from tandem.data import tokens


def separated(documents):
    mask = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    place = torch.arange(documents.shape[1])
    begins = documents.diff(prepend=documents[:, :1] - 1) != 0
    return mask, place - torch.where(begins, place, 0).cummax(dim=1).values


class OneLayer(nn.Module):
    """Attention within documents, and dropout: the next token of 64."""

    def __init__(self, length):
        super().__init__()
        self.token, self.place = nn.Embedding(64, 16), nn.Embedding(length, 16)
        self.attend, self.head = nn.Linear(16, 48), nn.Linear(16, 64)

    def forward(self, inputs, documents):
        mask, positions = separated(documents)
        x = functional.dropout(self.token(inputs) + self.place(positions), 0.1, self.training)
        query, key, value = self.attend(x)[:, None].chunk(3, dim=-1)
        return self.head(x + functional.scaled_dot_product_attention(query, key, value, mask)[:, 0])


@dataclass
class Packed:
    delay: float = 0.0
    seen: Path | None = None
    length: int = 32
    _trained: list = field(default_factory=list, init=False)

    def build_model(self):
        return OneLayer(self.length)

    def build_datasets(self):
        return tandem.Datasets(tokens("train-*.bin", self.length, end_of_document=0), None)

    def loss(self, model, batch):
        inputs, targets, documents = batch
        rows = torch.stack(batch, dim=1).numpy()
        self._trained += [zlib.crc32(row.tobytes()) for row in rows]
        logits = model(inputs, documents).flatten(0, 1)
        total = functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        return total / max(1, self.weight(batch))

    def weight(self, batch):
        return (batch[1] != -100).sum()

    def after_step(self, model, step):
        time.sleep(self.delay)
        if self.seen is not None:
            own = self._trained[-24 // get_world_size() :]  # the task was tried before the first step
            with self.seen.open("a") as file:
                file.write(" ".join(map(str, [step, *own])) + "\n")
        self._trained = []
