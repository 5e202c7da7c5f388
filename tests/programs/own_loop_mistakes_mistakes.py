import torch
from torch import nn

import tandem


def tried(what):
    try:
        what()
    except tandem.TandemError as error:
        print("said:", error.exit_code, error)


run = tandem.start()
tried(tandem.start)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 8))
tried(lambda: run.batches(dataset, batch_size=16, epochs=1))
tried(lambda: run.keep(best=1.0))
tried(lambda: run.wrap("a model"))  # type: ignore[arg-type]
model = run.wrap(nn.Linear(8, 1))
tried(lambda: run.keep(stranger=torch.optim.SGD(nn.Linear(8, 1).parameters(), lr=0.1)))
tried(lambda: run.keep(model=model, name="a text"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.keep(model=model, optimizer=optimizer)
tried(lambda: run.keep(model=model))
tried(lambda: run.wrap(nn.Linear(8, 1)))
tried(lambda: run.backward(model(torch.randn(1, 8)).sum()))
for (rows,) in run.batches(dataset, batch_size=16, epochs=1):
    tried(lambda: run.backward(model(rows)))  # noqa: B023
    tried(lambda: run.backward(model(rows).sum().detach()))  # noqa: B023
    tried(lambda: run.log(rows=rows))  # noqa: B023
    run.backward(model(rows).mean())
    run.backward(model(rows).mean())
