import os

import numpy as np
import torch
from torch import nn

import tandem


class Env:
    def __init__(self):
        self.x, self.count, self.rate = np.zeros(3, np.float32), np.int64(0), np.float32(0.1)

    def state_dict(self):
        return {"x": self.x, "count": self.count, "rate": self.rate}

    def load_state_dict(self, state):
        self.x, self.count, self.rate = state["x"], state["count"], state["rate"]


run = tandem.start()
model = run.wrap(nn.Linear(8, 2))
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
env, noise = Env(), np.random.default_rng(5)
kept = run.keep(model=model, opt=opt, env=env, noise=noise, best=np.float32(0))
x = torch.randn(480, 8)
data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
for a, b in run.batches(data, batch_size=24, steps=int(os.environ["STEPS"])):
    if run.step >= 15:  # after the first checkpoint
        for g in opt.param_groups:
            g["lr"] = 0.005 * (1 + np.cos(np.pi * run.step / 80)) * env.rate
    if first_life and run.rank == 1 and run.step == int(os.environ.get("DIE_AT", -1)):
        os.kill(os.getpid(), 9)
    env.x = env.x * env.rate + np.float32(noise.normal())
    env.count, env.rate = env.count + 1, env.rate * 0.99
    loss = nn.functional.cross_entropy(model(a + float(env.x[0])), b)
    run.backward(loss)
    opt.step()
    opt.zero_grad()
    accuracy = np.mean((model(a).argmax(1) == b).numpy(), dtype=np.float32)
    kept.best = max(kept.best, accuracy)
    run.log(accuracy=accuracy, count=env.count, array=env.x[:1])
print("ended with", type(env.x).__name__, type(env.count).__name__, type(env.rate).__name__)
