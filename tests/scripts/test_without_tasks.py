"""The launcher alone: a copy of the package that has no tasks, no data and no training runs scripts."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import tandem

pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]

SCRIPT = """
import os, signal, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    if step == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
weights = [torch.zeros(2, 4) for _ in range(2)]
dist.all_gather(weights, model.module.weight.detach())
if dist.get_rank() == 0:
    print("same weights", torch.equal(*weights), "generation", os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.destroy_process_group()
"""
BROKEN = 'raise LookupError("of its own")'


@pytest.fixture
def alone(scripts: Any) -> Any:
    package = scripts.folder / "packages" / "tandem"
    shutil.copytree(Path(tandem.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tasks", "data", "training"):
        shutil.rmtree(package / name)
    scripts.environment["PYTHONPATH"] = str(package.parent)
    code, said = scripts.run([sys.executable, "-c", "import tandem.work.program, tandem.tasks"])
    assert code == 1 and "No module named 'tandem.tasks'" in said, said
    return scripts


def test_a_plain_script_runs_and_a_killed_rank_is_restarted(alone: Any) -> None:
    (alone.folder / "script.py").write_text(SCRIPT)
    code, said = alone.run(alone.tandem("--nproc", 2, "script.py"))
    assert code == 0 and "same weights True generation 1" in said, said


def test_the_error_of_a_script_is_its_own(alone: Any) -> None:
    (alone.folder / "script.py").write_text(BROKEN)
    code, said = alone.run(alone.tandem("--nproc", 2, "script.py"))
    assert code == 1 and "LookupError: of its own" in said and "No module" not in said, said
