"""A small GPT on windows of tokens, which it reads from tar shards on another machine."""

import io
import time
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.nn import functional

import tandem
from tandem.data import tar_blocks

HERE = Path(__file__).parent
CACHE_BYTES = 1_500_000  # less than the shards have, so that blocks are evicted and asked for again


def window(sample):
    tokens = torch.from_numpy(numpy.load(io.BytesIO(sample["npy"])).astype("int64"))
    return tokens[:-1], tokens[1:]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        layers = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        self.feed_forward = nn.Sequential(*layers)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))


class Model(nn.Module):
    def __init__(self, vocabulary=128, context=64, width=32, heads=4, layers=2):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.tokens(tokens) + self.places(places)))


@dataclass
class Gpt:
    pause: float = 0.0  # seconds per step, until there is a file `quick`

    def build_model(self):
        return Model()

    def build_datasets(self):
        return tandem.Datasets(
            tar_blocks(HERE / "index.jsonl", window, cache_bytes=CACHE_BYTES, deadline=240), None
        )

    def loss(self, model, batch):
        time.sleep(0 if (HERE / "quick").exists() else self.pause)
        inputs, targets = batch
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
