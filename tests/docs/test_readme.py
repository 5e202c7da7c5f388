"""README's commands, word for word: each runs here, or is on the list of those that need more than a machine.

The list says what runs it instead. A command that README gets is on neither, and fails until it is.
"""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = r"(?:sudo )?(?:make|tandem|torchrun|srun|sbatch|kubectl|pip) \S.*"

HERE = [
    "tandem launch --nodes 2 --run-dir runs/digits --epochs 2",
    "torchrun --nproc-per-node 2 -m tandem train --run-dir runs/digits",
    "tandem eval RUN",
    "tandem export RUN",
    "tandem runs",
    "tandem report runs/digits",
    "tandem launch --nodes 2 --task examples/my_task.py:MyTask --task.width 64",
    "tandem train",
    "tandem launch --nodes 2 train.py",
    "tandem launch --nodes 2 train.py --lr 0.1",
    "tandem config --explain",
    "tandem init DIR",
]
"""In this order, in a folder with README's examples and a train.py; RUN is runs/digits, DIR a new folder."""

ELSEWHERE = {
    "make train NODES=2": "tests/unit/test_make_variables.py",
    "make train NODES=2 EPOCHS=50 RUN=runs/broken": "tests/unit/test_make_variables.py",
    "tandem kill runs/broken --rank 1": "tests/unit/test_kill.py",
    "tandem kill runs/broken --rank 1 --signal STOP": "tests/unit/test_kill.py",
    "tandem page runs": "tests/unit/test_serve.py",
    "tandem launch": "tests/faults/test_hangup.py",
    "tandem verify-resume --nproc 2 --task examples/my_task.py:MyTask": "tests/faults/test_verify_resume.py",
    "tandem check my_task.py": "tests/faults/test_check.py",
    "tandem launch --nodes 2 --node-rank 0 --master node1:29500 --run-dir runs/digits": (
        "tests/faults/test_nodes.py"
    ),
    "make bench": "tests/benchmarks/test_tables.py",
    "make gpu-check": "tests/benchmarks/test_gpu_check.py",
    "make compose-up NODES=2": "tests/container/test_cluster.py",
    "make compose-up NODES=2 MONITORING=1": "tests/container/test_watched_cluster.py",
    "make compose-up NODES=2 SCRIPT=train.py": "tests/container/test_cluster.py",
    "make chaos FAULT=kill-node NODE=1": "tests/container/test_chaos.py",
    "make compose-down": "tests/container/test_cluster.py",
    "sudo make docker-host": "tests/unit/test_compose_files.py",
    "srun --ntasks-per-node=1 tandem launch --run-dir runs/digits": "tests/slurm/test_two_nodes.py",
    "sbatch slurm/train.sbatch --task digits": "tests/slurm/test_two_nodes.py",
    "kubectl apply -f k8s/pytorchjob.yaml": "tests/k8s/test_manifests.py",
    "make k8s-apply OVERLAY=gpu,kueue": "tests/k8s/test_overlays.py",
    "make k8s-apply OVERLAY=indexed-job": "tests/k8s/test_manifests.py",
    "make k8s-apply OVERLAY=script": "tests/k8s/test_overlays.py",
    "make k8s-try": "tests/k8s/test_commands.py",
}  # fmt: skip
"""{what needs an engine, a cluster, a terminal or minutes: the test that covers it}."""

SCRIPT = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1.0)
torch.distributed.init_process_group("gloo")
total = torch.tensor(parser.parse_args().lr)
torch.distributed.all_reduce(total)
print("the sum is", round(total.item(), 2), flush=True)
torch.distributed.destroy_process_group()
"""


def commands() -> list[str]:
    """Every command of README, once: lines of code blocks, and code spans that are one."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.M | re.S)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    lines = [re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    found = [re.fullmatch(rf"(?:\$ )?({PROGRAM})", line) for line in lines + spans]
    return list(dict.fromkeys(match[1] for match in found if match))


def test_every_command_runs_here_or_in_a_test_that_is_named() -> None:
    assert sorted(commands()) == sorted([*HERE, *ELSEWHERE])
    assert [path for path in ELSEWHERE.values() if not (ROOT / path).is_file()] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_commands_run_word_for_word(tmp_path: Path, processes: Any) -> None:
    """Variables make the runs short, and keep their ports apart from others'."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "train.py").write_text(SCRIPT)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    short = {"TANDEM_STEPS": "12", "TANDEM_METRICS_PORT": "0", "TANDEM_PROGRESS": "off"}
    here = {"PATH": f"{Path(sys.executable).parent}:{kept['PATH']}", "TANDEM_METRICS_LINGER": "0"}
    said = {}
    for command in HERE:
        words = shlex.split(command.replace(" RUN", " runs/digits").replace(" DIR", " project"))
        code, said[command] = processes.run(words, limit=600, cwd=tmp_path, env=kept | short | here)
        assert code == 0, f"{command}\n{said[command]}"
    assert "finished at step 12" in said["tandem launch --nodes 2 --run-dir runs/digits --epochs 2"]
    assert "is complete at step 12" in said[HERE[1]], "torchrun, on the same run"
    assert "accuracy" in said["tandem eval RUN"]
    assert re.search(r"^digits +finished +12 ", said["tandem runs"], re.M), said["tandem runs"]
    assert "the sum is 0.2" in said["tandem launch --nodes 2 train.py --lr 0.1"]
    assert (tmp_path / "runs" / "digits" / "report.html").is_file()
    assert list(tmp_path.glob("*.safetensors")) and (tmp_path / "project" / "task.py").is_file()
