"""A shell or batch script in a Slurm allocation, without srun: one node of Slurm, as good as a laptop."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import tandem
from program_files import program_text

TASK = program_text("allocations_task")
FOREIGN = re.compile(r"TANDEM_|PET_|SLURM_|OMPI_|TORCHELASTIC_|RANK$|LOCAL_|WORLD_SIZE|MASTER_|NNODES")
# As `salloc -N1` sets them (Slurm 22.05), with what batch scripts often export.
SALLOC = {
    "SLURM_JOB_ID": "10",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "node1",
    "SLURM_NTASKS": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
# What a job inherits that is submitted from a step of another job.
INHERITED = {
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NODELIST": "node2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
SETTINGS = "--batch-size 24 --steps 8 --threads 1 --metrics-linger 0 --metrics 0 --device cpu".split()


def environment(folder: Path, **variables: str) -> dict[str, str]:
    (folder / "line.py").write_text(TASK)
    clean = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    return {**clean, "PYTHONPATH": str(Path(tandem.__file__).parents[1]), **variables}


@pytest.mark.timeout(240)
def test_launch_trains_in_an_allocation_without_srun(processes: Any, tmp_path: Path) -> None:
    """One node, and two simulated ones; variables of another job's step change nothing."""
    command = [sys.executable, "-m", "tandem", "launch", "--task", "line.py:Line", *SETTINGS]
    runs = {"one": (1, SALLOC), "two": (2, {**SALLOC, **INHERITED})}
    started = {
        name: processes.start(
            [*command, "--run-dir", name, *(["--nodes", "2"] if nodes == 2 else [])],
            cwd=tmp_path,
            env=environment(tmp_path, **variables),
        )
        for name, (nodes, variables) in runs.items()
    }
    for name, process in started.items():
        code, output = processes.wait(process, 110)
        assert code == 0, output
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert (summary["global_step"], summary["nodes"]) == (8, runs[name][0]), output
        assert "SLURM" not in output, output


@pytest.mark.timeout(600)
def test_check_and_verify_resume_run_in_an_allocation(processes: Any, tmp_path: Path) -> None:
    """Also in one of several nodes, whose other nodes they do not need; a rank of several is refused."""
    several = {**SALLOC, "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS": "2"}
    tandem_ = [sys.executable, "-m", "tandem"]
    for verb, variables in {"check": several, "verify-resume": {**SALLOC, **INHERITED}}.items():
        words = ["line.py:Line"] if verb == "check" else ["--task", "line.py:Line", "--trials", "1"]
        command = [*tandem_, verb, *words, "--batch-size", "24", "--threads", "1"]
        env = environment(tmp_path, **variables)
        code, output = processes.run(command, 250, cwd=tmp_path, env=env)
        assert code == 0 and "verdict: " in output, output
    of_two = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    step = {**several, **INHERITED, **of_two, "SLURM_STEP_NODELIST": "node[1-2]"}
    refused = environment(tmp_path, **step)
    refused.pop("MASTER_ADDR")
    code, output = processes.run([*tandem_, "check", "line.py:Line"], 60, cwd=tmp_path, env=refused)
    assert code == 2 and "slurm" in output, output
