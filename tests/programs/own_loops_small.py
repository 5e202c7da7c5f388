import os
import signal  # noqa: F401

import torch
from torch import nn

import tandem

run = tandem.start()
layers = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2)
model = run.wrap(nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
seen = torch.zeros(3)
kept = run.keep(model=model, optimizer=optimizer, best=0.0, seen=seen)
x = torch.randn(256, 8, generator=torch.Generator().manual_seed(3))
dataset = torch.utils.data.TensorDataset(x, x[:, :2].argmax(1))
first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
signal_at = int(os.environ.get("SIGNAL_AT", -1)) if first_life else -1
for inputs, labels in run.batches(dataset, batch_size=16, epochs=3):
    if run.step == signal_at and run.rank == int(os.environ.get("TO_RANK", 0)):
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
    loss = nn.functional.cross_entropy(model(inputs), labels)
    run.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    seen += 1
    kept.best = max(kept.best, run.step / 3)
    run.log(loss=loss, step=run.step)
print("after the loop", run.step, kept.best, seen.tolist())
