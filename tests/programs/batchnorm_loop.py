import torch
from torch import nn

import tandem

run = tandem.start()
torch.manual_seed(1)
norm = nn.BatchNorm1d(32)
model = run.wrap(nn.Sequential(nn.Linear(8, 32), norm, nn.ReLU(), nn.Linear(32, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.keep(model=model, optimizer=optimizer)
x = torch.randn(256, 8, generator=torch.Generator().manual_seed(3))
dataset = torch.utils.data.TensorDataset(x, x[:, :2].argmax(1))
for inputs, labels in run.batches(dataset, batch_size=16, steps=4):
    loss = nn.functional.cross_entropy(model(inputs), labels)
    run.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
open(f"means-{run.rank}", "w").write(str(norm.running_mean.tolist()))
