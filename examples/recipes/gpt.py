"""A GPT on files of tokens: memory-mapped, next-token loss, a loop of its own.

    tandem launch --nodes 2 --run-dir runs/gpt examples/recipes/gpt.py data/tokens --steps 2000

train*.bin and val*.bin are token files of nanoGPT or Megatron. docs/recipes.md makes some.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import tandem
from tandem.data import tokens


class Block(nn.Module):
    """Attention to earlier tokens, then a feed-forward network: [B, T, width] -> the same."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        layers = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        self.feed_forward = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        share = self.dropout if self.training else 0.0
        seen = scaled_dot_product_attention(q, k, v, dropout_p=share, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """Tokens [B, T] -> logits [B, T, vocabulary]; the output layer shares the embedding's weights."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width, layers, words = options.width, options.layers, options.vocabulary
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(options.context, width)
        self.blocks = nn.Sequential(*(Block(width, options.heads, options.dropout) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        for layer in (self.tokens, self.places, *(m for m in self.modules() if isinstance(m, nn.Linear))):
            nn.init.normal_(layer.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))
        return logits


DEFAULTS = {
    "vocabulary": 256, "context": 256, "width": 256, "layers": 4, "heads": 4, "dropout": 0.1, "parts": 1,
    "batch-size": 64, "steps": 2000, "warmup": 100, "lr": 1e-3, "clip": 1.0, "eval-every": 200,
}  # fmt: skip
parser = argparse.ArgumentParser(usage="gpt.py DATA [--OPTION NUMBER ...]")
parser.add_argument("data", type=Path, help="folder of train*.bin and val*.bin")
for name, default in DEFAULTS.items():
    parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default {default}")
options = parser.parse_args()
try:
    train, val = (tokens(options.data / f"{part}*.bin", options.context) for part in ("train", "val"))
except tandem.TandemError as error:
    parser.error(str(error))
some = range(min(len(train), 1_000_000 // options.context))
if (most := int(train.__getitems__(some)[0].max())) >= options.vocabulary:
    parser.error(f"{options.data} has token {most}; expected --vocabulary {most + 1} or more")

run = tandem.start()
net = GPT(options)
model = run.wrap(net)
matrices, others = ([p for p in net.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False))
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
run.keep(model=model, optimizer=optimizer)
device = net.head.weight.device


def next_token_loss(through: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = through(inputs)
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def validation_loss() -> float:
    """The mean over the first windows of the validation files; no other rank has a part in it."""
    inputs, targets = val.__getitems__(range(min(len(val), options.batch_size)))
    net.eval()
    loss = next_token_loss(net, inputs.to(device), targets.to(device))
    net.train()
    return loss.item()


for batch in run.batches(train, batch_size=options.batch_size, steps=options.steps):
    progress = (run.step - options.warmup) / max(1, options.steps - options.warmup)
    rate = (run.step + 1) / options.warmup if progress < 0 else 0.55 + 0.45 * math.cos(math.pi * progress)
    for group in optimizer.param_groups:
        group["lr"] = options.lr * rate
    optimizer.zero_grad()
    for inputs, targets in run.parts(batch, options.parts):
        loss = next_token_loss(model, inputs, targets)
        run.backward(loss)
    nn.utils.clip_grad_norm_(net.parameters(), options.clip)
    optimizer.step()
    run.log(loss=loss)
    if run.rank == 0 and (run.step + 1) % options.eval_every == 0:
        print(f"step {run.step + 1}: validation loss {validation_loss():.4f}", flush=True)
