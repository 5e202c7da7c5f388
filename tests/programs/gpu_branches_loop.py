import json

import torch

import played_gpu

mode, notes = played_gpu.play()
mode.__enter__()
import tandem  # noqa: E402

run = tandem.start(["--device", "cuda", "--metrics", "0", "--metrics-linger", "0", "--log-every", "20"])
model = run.wrap(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
run.keep(model=model, optimizer=optimizer)
x = torch.randn(480, 8)
rows = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
for inputs, labels in run.batches(rows, batch_size=24, steps=40):
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    run.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    run.log(loss=loss, twice=2 * loss)
with open("notes.json", "w") as file:
    json.dump(notes.counts, file)
