"""Rare, long work in a loop is no hang, a hang is one, and the same hang twice ends the job."""

import os
from pathlib import Path
from typing import Any

import pytest
from own_loops import Scripts

pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]

LONG_SECONDS = float(os.environ.get("LONG_WORK_SECONDS", "11"))
"""More than ten: after those a rank was called hung. `LONG_WORK_SECONDS=90` is what is promised."""

LOOP = """
import hashlib, os, subprocess, sys, threading, time
import torch, tandem
from torch import nn

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
"""

STUCK = """
import os, threading, time
import torch, tandem
import torch.distributed as dist
from torch import nn

run = tandem.start()
model = run.wrap(nn.Linear(8, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
run.keep(model=model, opt=opt)
x = torch.randn(480, 8)
data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
for a, b in run.batches(data, batch_size=24, steps=60):
    if run.step == 30:
        if os.environ["HOW"] == "asleep" and run.rank == 1:
            threading.Event().wait()
        if os.environ["HOW"] == "alone" and run.rank == 0:
            dist.barrier()
    run.backward(nn.functional.cross_entropy(model(a), b))
    opt.step()
    opt.zero_grad()
"""


@pytest.fixture
def scripts(tmp_path: Path, processes: Any) -> Scripts:
    scripts = Scripts(tmp_path, processes)
    scripts.write("loop.py", LOOP)
    scripts.write("stuck.py", STUCK)
    return scripts


ALL_PLACES = "data forward loss computing optimizer process thread between"


@pytest.mark.parametrize("places", ["between", pytest.param(ALL_PLACES, marks=pytest.mark.slow)])
def test_long_work_in_a_step_raises_no_alarm_by_default(scripts: Scripts, places: str) -> None:
    process = scripts.launch(["--nproc", "2"], "loop.py", "run", PLACES=places, SECONDS=LONG_SECONDS)
    code, output = scripts.processes.wait(process, 120 + len(places.split()) * LONG_SECONDS)
    assert code == 0 and "hang:" not in output, output
    assert scripts.summary("run")["restarts"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["asleep", pytest.param("alone", marks=pytest.mark.soak)])
def test_the_same_hang_twice_ends_the_job_with_200(scripts: Scripts, how: str) -> None:
    words = ["--nproc", "2", "--hang-timeout", "3"]
    code, output = scripts.processes.wait(scripts.launch(words, "stuck.py", "run", HOW=how), 200)
    assert code == 200, output
    assert output.count("restarting all ranks") == 1, output
    (last,) = [line for line in output.splitlines() if "ended with code 200" in line]
    assert "step 30" in last and "the same hang" in last
    assert how == "alone" or "rank 1" in last
    assert scripts.summary("run")["restarts"] == 1
