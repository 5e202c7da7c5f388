"""An Accelerate script: prepare, backward through the accelerator, save_state and load_state of its own."""

import argparse
import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

print(f"first line {time.time():.3f} pid {os.getpid()} rank {os.environ['RANK']}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    x = torch.randn(256, 10, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for _ in range(options.epochs):
        for inputs, targets in data:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(options.pause)
    mean = accelerator.reduce(loss.detach(), reduction="mean")
    accelerator.print(f"final loss {mean.item():.9f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
