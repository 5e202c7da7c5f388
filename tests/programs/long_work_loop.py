import hashlib
import os
import subprocess
import sys
import threading
import time

import torch
from torch import nn

import tandem

SECONDS, PLACES = float(os.environ["SECONDS"]), os.environ["PLACES"].split()


def work(place, on=None):
    if place in PLACES and run.step == 5 + 3 * PLACES.index(place) and run.rank != on and place not in done:
        done.add(place)
        until = time.monotonic() + SECONDS
        if place == "computing":
            while time.monotonic() < until:
                hashlib.sha256(bytes(1000)).digest()
        elif place == "process":
            subprocess.run([sys.executable, "-c", f"import time; time.sleep({SECONDS})"])
        elif place == "thread":
            thread = threading.Thread(target=time.sleep, args=[SECONDS])
            thread.start()
            thread.join()
        else:
            time.sleep(SECONDS)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x):
        work("forward")
        return self.layer(x)


done = set()
run = tandem.start()
model = run.wrap(Model())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
opt.register_step_pre_hook(lambda *_: work("optimizer"))
run.keep(model=model, opt=opt)
x = torch.randn(480, 8)
data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
for a, b in run.batches(data, batch_size=24, steps=40):
    work("data", on=1)
    loss = nn.functional.cross_entropy(model(a), b)
    work("loss", on=0)
    run.backward(loss)
    work("computing")
    opt.step()
    opt.zero_grad()
    work("process", on=1)
    work("thread")
    work("between")
