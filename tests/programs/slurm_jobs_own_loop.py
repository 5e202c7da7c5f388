import torch

import tandem

run = tandem.start()
torch.manual_seed(1)
model = run.wrap(torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.keep(model=model, optimizer=optimizer)
x = torch.randn(240, 8)
dataset = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
for inputs, labels in run.batches(dataset, batch_size=24, epochs=3):
    run.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
    optimizer.step()
    optimizer.zero_grad()
