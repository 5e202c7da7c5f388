import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import tandem
from tandem.data import mix


class Shards:
    """Rows in shards of 1 to 30: (inputs, label, index)."""

    def __init__(self, rows, start, changed=False):
        self.x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(start))
        self.start = start
        self.changed = changed

    def block_sizes(self):
        if self.changed:
            return [500, 503]
        sizes = [1 + 7 * number % 30 for number in range(len(self))]
        kept = next(count for count in range(len(self)) if sum(sizes[: count + 1]) >= len(self))
        return [*sizes[:kept], len(self) - sum(sizes[:kept])]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index, :3].argmax(), index + self.start

    def __getitems__(self, indices):
        return [self[index] for index in indices]

    def will_need(self, blocks):
        pass


@dataclass
class Small:
    delay: float = 0.0
    mixed: bool = False
    seen: Path | None = None
    _trained: list = field(default_factory=list, init=False)

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 3))

    def build_datasets(self):
        train = Shards(1003, 0, Path("changed").exists())
        if not self.mixed:
            return tandem.Datasets(train, None)
        stages = {30: {"first": 1, "second": 2}}
        return tandem.Datasets(mix({"first": (train, 3), "second": (Shards(400, 1003), 1)}, stages), None)

    def loss(self, model, batch, step):
        x, y, index = batch
        time.sleep(self.delay)
        self._trained = [step, *index.tolist()]
        return nn.functional.cross_entropy(model(x), y)

    def after_step(self, model, step):
        if self.seen is not None:
            with self.seen.open("a") as file:
                file.write(" ".join(map(str, self._trained)) + "\n")
