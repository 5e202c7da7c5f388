import torch

import tandem


def train():
    run = tandem.start()
    model = run.wrap(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.ones(64, 2))
    for (inputs,) in run.batches(data, batch_size=8, steps=1_000_000):
        run.backward(model(inputs).mean())
        optimizer.step()
        optimizer.zero_grad()


try:
    tandem.launch(train, nodes=2, run_dir="run", log_every=10)
except KeyboardInterrupt:
    print("INTERRUPTED")
