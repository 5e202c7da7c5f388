"""A trainer with Accelerate: `audit_accelerate.py KIND`. It resumes exactly, or has one known bug.

Correct are `steps` (a checkpoint every few steps, all seeds from the step) and `epochs` (a checkpoint after
each epoch, default sampler). `documented` does what the page on checkpointing of Accelerate's documentation
shows, and `seedable` the same with its seedable sampler. The other kinds are bugs that users have filed.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

KIND = sys.argv[1]
EPOCHS, SAMPLES, BATCH, SAVE_EVERY = 3, 64, 4, 5
SEEDABLE = KIND not in ("documented", "epochs")
SEEDED = SEEDABLE and KIND not in ("seedable", "random")
BY_EPOCH = KIND in ("epochs", "order-repeats", "repeated")
CHECKPOINTS = Path("checkpoints")
torch.set_num_threads(1)

loading = DataLoaderConfiguration(use_seedable_sampler=SEEDABLE)
accelerator = Accelerator(cpu=True, dataloader_config=loading)
set_seed(7)
inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), BATCH, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 6, 0.8)
if KIND != "schedule":  # otherwise neither prepared nor registered, so save_state leaves it out
    scheduler = accelerator.prepare(scheduler)
PER_EPOCH = len(loader)


def saved():
    """Return the steps of the checkpoints that were written to the end."""
    return sorted(int(path.name) for path in CHECKPOINTS.glob("*") if path.name.isdigit())


def save(step):
    accelerator.wait_for_everyone()
    name = CHECKPOINTS / f"{step}.tmp"
    if accelerator.is_main_process:
        shutil.rmtree(name, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(name))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.replace(name, CHECKPOINTS / str(step))
    accelerator.wait_for_everyone()


step = 0
if steps := saved():
    step = steps[-1]
    folder = CHECKPOINTS / str(step)
    if KIND == "optimizer-lost":
        from safetensors.torch import load_file

        accelerator.unwrap_model(model).load_state_dict(load_file(folder / "model.safetensors"))
        scheduler.load_state_dict(torch.load(folder / "scheduler.bin"))
    else:
        accelerator.load_state(str(folder))
epoch, position = divmod(step, PER_EPOCH)
if KIND == "skipped" and position:
    epoch, position = epoch + 1, 0
if KIND == "repeated" and step:
    epoch = epoch - 1
while epoch < EPOCHS:
    if KIND != "order-repeats":
        loader.set_epoch(epoch)
    batches = accelerator.skip_first_batches(loader, position) if position else loader
    if KIND == "data-restarts":
        batches = loader
    for at, (x, y) in enumerate(batches, position):
        if at == PER_EPOCH:
            break
        if SEEDED:
            torch.manual_seed(1000 * step + accelerator.process_index)
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if accelerator.is_main_process:
            with open("log.jsonl", "a") as log:
                log.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
        if not BY_EPOCH and step % SAVE_EVERY == 0:
            save(step)
        time.sleep(0.01)
    if BY_EPOCH:
        save(step)
    epoch, position = epoch + 1, 0
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
accelerator.end_training()
