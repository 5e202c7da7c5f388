"""Train for STEPS steps, and note each in FOLDER: a custom loop, or a script without tandem.

Arguments: `loop` or `script`, FOLDER, STEPS.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

KIND, FOLDER, STEPS = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])


def note(step):
    if os.environ["RANK"] == "0":
        (FOLDER / "step.new").write_text(str(step))
        (FOLDER / "step.new").rename(FOLDER / "step")
    time.sleep(0.02)


if KIND == "loop":
    import tandem

    run = tandem.start()
    model = run.wrap(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.ones(1_000, 4))
    for step, (inputs,) in enumerate(run.batches(data, batch_size=4, steps=STEPS), 1):
        run.backward(model(inputs).sum())
        optimizer.step()
        optimizer.zero_grad()
        note(step)
else:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        note(step)
    dist.destroy_process_group()
