"""Plain DDP for torchrun: replace it with your script. It resumes from a file that it saves itself."""

import argparse
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
options = parser.parse_args()

torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
torch.manual_seed(0)
inputs = torch.randn(6144, 20)
data = TensorDataset(inputs, inputs[:, :1] * 2 + 1)
sampler = DistributedSampler(data)
model = nn.Linear(20, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

path, first = os.path.join(os.environ["TANDEM_RUN_DIR"], "snapshot.pt"), 0
if os.path.exists(path):
    saved = torch.load(path, map_location=device)
    model.load_state_dict(saved["model"])
    first = saved["epoch"]
    print(f"resuming after epoch {first}", flush=True)
model = DistributedDataParallel(model)
for epoch in range(first, options.epochs):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=64, sampler=sampler):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
    if torch.distributed.get_rank() == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
        torch.save({"model": model.module.state_dict(), "epoch": epoch + 1}, f"{path}.new")
        os.replace(f"{path}.new", path)
torch.distributed.destroy_process_group()
