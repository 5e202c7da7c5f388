import torch
from stand import stand

import tandem

run = tandem.start()
model = run.wrap(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.keep(model=model, optimizer=optimizer)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.zeros(64, dtype=torch.long))
for x, y in run.batches(data, batch_size=16, epochs=100_000):
    if run.step == 30:
        stand()
    run.backward(torch.nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
