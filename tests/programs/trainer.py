"""A plain PyTorch trainer without tandem: `trainer.py KIND SEED`. It resumes exactly, or has one known bug.

Each bug is one line that people forget or get wrong; KIND is the name of the bug, or `plain`, `workers` (a
DataLoader with workers), `epochs` (saves after each epoch only) or `manual` (no DataLoader).
"""

import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

KIND, SEED = sys.argv[1], int(sys.argv[2])
EPOCHS, SAMPLES, BATCH, SAVE_EVERY = 4, 40, 4, 3
PER_EPOCH = SAMPLES // BATCH
BY_EPOCH = KIND in ("epochs", "repeated")
CHECKPOINT, LOG = Path("checkpoint.pt"), Path("log.jsonl")
torch.set_num_threads(1)
torch.manual_seed(SEED)
random.seed(SEED)
np.random.seed(SEED)


class Points(Dataset):
    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SAMPLES, 8, generator=draw)
        self.targets = self.inputs.sum(1, keepdim=True)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        # An augmentation. Workers would need a seed for each sample.
        noise = 0.0 if KIND == "workers" else float(np.random.normal())
        return self.inputs[index] + 0.1 * noise, self.targets[index]


def batches(data, epoch, first):
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
    rest = order[first * BATCH :]
    if KIND == "manual":
        for at in range(0, len(rest), BATCH):
            pairs = [data[index] for index in rest[at : at + BATCH]]
            yield tuple(torch.stack(each) for each in zip(*pairs, strict=True))
        return
    # The loader draws a base seed for workers from the global state, which must not depend on the restart.
    draw = torch.Generator().manual_seed(epoch)
    yield from DataLoader(data, BATCH, sampler=rest, num_workers=KIND == "workers", generator=draw)


def save(state):
    # Not in place, so that a kill leaves the older checkpoint.
    torch.save(state, "checkpoint.tmp")
    os.replace("checkpoint.tmp", CHECKPOINT)


first = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
model = nn.Sequential(first, nn.Linear(8, 1))
resumed = torch.load(CHECKPOINT, weights_only=False) if CHECKPOINT.exists() else None
parameters = list(model.parameters())
if resumed and KIND == "optimizer-permuted":
    parameters = [*parameters[2:4], *parameters[:2], *parameters[4:]]
optimizer = torch.optim.Adam(parameters, lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=6)
ema = [each.detach().clone() for each in parameters]
epoch, position, step = 0, 0, 0
if resumed:
    if KIND == "cannot-resume":
        raise KeyError("the checkpoint has no entry 'iteration'")
    weights = resumed["model"]
    if KIND == "weights":
        weights = {name: value.half().to(value.dtype) for name, value in weights.items()}
    if KIND == "buffers":
        weights = {name: value for name, value in weights.items() if "running" not in name}
    model.load_state_dict(weights, strict=False)
    if KIND != "optimizer-lost":
        optimizer.load_state_dict(resumed["optimizer"])
    if KIND != "schedule":
        scheduler.load_state_dict(resumed["scheduler"])
    if KIND != "scaler":
        scaler.load_state_dict(resumed["scaler"])
    if KIND != "ema":
        ema = resumed["ema"]
    if KIND != "random":
        torch.set_rng_state(resumed["torch"])
    if KIND != "augmentation":
        np.random.set_state(resumed["numpy"])
    epoch, position, step = resumed["epoch"], resumed["position"], resumed["step"]
    if KIND == "data-restarts":
        position = 0
start_epoch, start_step = epoch, step
data, loss_of = Points(), nn.MSELoss()
while epoch < EPOCHS:
    shuffle = epoch - start_epoch if KIND == "order-repeats" else epoch
    for inputs, targets in batches(data, shuffle, position):
        if KIND == "fewer-steps" and step - start_step >= EPOCHS * PER_EPOCH - 2 * start_step:
            break
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        with torch.no_grad():
            for mean, value in zip(ema, parameters, strict=True):
                mean.mul_(0.9).add_(value, alpha=0.1)
        step, position = step + 1, position + 1
        with LOG.open("a") as log:
            log.write(json.dumps({"step": step, "loss": loss.item(), "time": time.time()}) + "\n")
        if position == PER_EPOCH if BY_EPOCH else step % SAVE_EVERY == 0 or step == EPOCHS * PER_EPOCH:
            is_done = position == PER_EPOCH and KIND != "repeated"
            where = (epoch + 1, 0) if is_done or KIND == "skipped" else (epoch, position % PER_EPOCH)
            save({
                "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
                "scheduler": scheduler.state_dict(), "scaler": scaler.state_dict(), "ema": ema,
                "torch": torch.get_rng_state(), "numpy": np.random.get_state(), "args": Path(KIND),
                "epoch": where[0], "position": where[1],
            })  # fmt: skip
        time.sleep(0.003)
    epoch, position = epoch + 1, 0
torch.save(model.state_dict(), "model.pt")
