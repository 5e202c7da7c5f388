"""A language model of characters on a stream: a text is read piece by piece, and again from its beginning."""

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

CHARACTERS, CONTEXT, WIDTH, BATCH, STEPS = 128, 32, 48, 16, 48


class Pieces(IterableDataset[Tensor]):
    """Int64 [CONTEXT + 1], one behind the other; it knows where it stands."""

    def __init__(self, path: Path) -> None:
        self.text, self.place = path.read_bytes(), 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            piece = self.text[self.place : self.place + CONTEXT + 1]
            self.place = self.place + CONTEXT if self.place + 2 * CONTEXT < len(self.text) else 0
            yield torch.tensor(list(piece)).clamp(max=CHARACTERS - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Model(nn.Module):
    """Characters [B, T] -> logits [B, T, CHARACTERS]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CHARACTERS, WIDTH), nn.Linear(WIDTH, CHARACTERS)
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, characters: Tensor) -> Tensor:
        logits: Tensor = self.head(self.memory(self.embedding(characters))[0])
        return logits


torch.manual_seed(0)
stream = Pieces(Path(argparse.__file__))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for pieces in islice(DataLoader(stream, BATCH), STEPS):
    optimizer.zero_grad()
    loss = cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())
    loss.backward()
    optimizer.step()
print(f"weights {nn.utils.parameters_to_vector(model.parameters()).norm().item():.4f}")
