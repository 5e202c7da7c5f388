import sys

import torch
from loaded import Rows
from torch import nn

import tandem

run = tandem.start()
model = run.wrap(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.keep(model=model, optimizer=optimizer)
for x, y in run.batches(Rows(int(sys.argv[1]), int(sys.argv[2])), batch_size=24, steps=30):
    optimizer.zero_grad()
    run.backward(nn.functional.cross_entropy(model(x / 480), y))
    optimizer.step()
print("the end", flush=True)
