"""Every branch for GPUs, run: ranks on played GPUs (tests/played_gpu.py), numbers and places counted."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import played_gpu
from patience import patient
from played_gpu import Notes
from program_files import program_text

pytestmark = pytest.mark.multi

TASK = program_text("gpu_branches_task")
STEPS = 40
FLAGS = ("--task", "small.py:Small", "--batch-size", "24", "--steps", STEPS, "--log-every", STEPS // 2,
         "--device", "cuda", "--metrics-linger", "0", "--metrics", "0")  # fmt: skip


class Ranks:
    """Runs of two ranks in a folder, and what each noted."""

    def __init__(self, folder: Path, processes: Any) -> None:
        self.folder, self.processes = folder, processes
        (folder / "small.py").write_text(TASK)

    def run(self, name: str, *flags: object, gpus: int = 2) -> tuple[list[Notes], str]:
        """Two ranks to their end: their notes, and what was said."""
        notes = self.folder / f"{name}-notes"
        code, output = self.processes.run(
            played_gpu.command("launch", "--nproc", 2, *FLAGS, "--run-dir", name, *flags),
            cwd=self.folder,
            env=played_gpu.environment(notes, gpus),
        )
        assert code == 0, output
        return [played_gpu.noted(notes, rank) for rank in (0, 1)], output


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, module_processes: Any) -> Iterator[Ranks]:
    yield Ranks(tmp_path_factory.mktemp("played"), module_processes)


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> tuple[list[Notes], str]:
    return ranks.run("plain")


def test_each_rank_takes_its_own_gpu_and_nccl(plain: tuple[list[Notes], str]) -> None:
    notes, output = plain
    assert "2 ranks on 1 node (cuda)" in output
    for rank, note in enumerate(notes):
        assert note.backends == ["nccl"]
        assert note.counts[f"set_device cuda:{rank}"]["distributed/group.py:_bind"] == 1
        assert len([each for each in note.counts if each.startswith("set_device")]) == 1
        assert note.environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
        assert note.environment["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"
        assert note.environment["TORCH_DIST_USE_NCCL2"] == "0"  # the newer one hides no exchange
        assert note.bound_to == [f"cuda:{rank}"]  # left alone, torch 2.15 binds to the global rank's
        assert note.device_ids == [f"[device(type='cuda', index={rank})]"]


def test_a_single_rank_trains_without_ddp_to_the_same_weights(ranks: Ranks) -> None:
    """DDP copies all gradients, and cuts a compiled model into one graph per bucket, although nothing is
    exchanged."""
    ended = []
    for name, more in (("lone", ()), ("wrapped", ("--device", "cpu"))):
        notes = ranks.folder / f"{name}-notes"
        flags = ("--nproc", 1, *FLAGS, "--run-dir", name, *more)
        environment = played_gpu.environment(notes, 1)
        code, output = ranks.processes.run(
            played_gpu.command("launch", *flags), cwd=ranks.folder, env=environment
        )
        assert code == 0, output
        assert played_gpu.noted(notes).device_ids == ([] if name == "lone" else ["None"])
        ended.append(json.loads((ranks.folder / name / "summary.json").read_text())["weights_sha256"])
    assert len(set(ended)) == 1


def test_no_step_makes_the_host_wait_for_the_gpu(plain: tuple[list[Notes], str]) -> None:
    """But for the numbers of the step before, which are on the host by then (an event says so)."""
    for note in plain[0]:
        passed = {"distributed/consensus.py:drain", "data/fetch.py:fetch"}  # the index of a batch's seed
        waits = {place: count for place, count in note.counts["wait"].items() if place not in passed}
        assert max(waits.values()) < STEPS, waits
        assert note.counts["event"]["distributed/consensus.py:read"] == STEPS
        assert note.counts["wait for an event"]["distributed/consensus.py:drain"] == STEPS
        assert note.counts["pinned memory"]["distributed/consensus.py:read"] == STEPS
        assert sum(note.counts["pinned copy"].values()) >= 2 * STEPS


def test_a_rank_that_sees_no_gpu_ends_all_with_one_line(ranks: Ranks, free_port: int) -> None:
    """One opened nccl and the other gloo, and both waited for half an hour, six times."""
    started = []
    for rank in (0, 1):
        flags = ("--task", "small.py:Small", "--batch-size", 24, "--steps", 4, "--metrics", 0)
        environment = played_gpu.environment(ranks.folder / "unlike", gpus=1 - rank) | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port),
        }  # fmt: skip
        command = played_gpu.command("train", *flags, "--metrics-linger", 0, "--run-dir", "unlike")
        started.append(ranks.processes.start(command, cwd=ranks.folder, env=environment))
    said = [ranks.processes.wait(process) for process in started]
    assert [code for code, _ in said] == [2, 2], said
    assert "has a GPU and rank 1 on" in said[0][1] and "--device cpu" in said[0][1]


def test_what_stands_by_has_opened_its_gpu(ranks: Ranks) -> None:
    (ranks.folder / "dies").touch()
    notes, output = ranks.run("standing", "--warm-gpu", "--hang-timeout", patient(60))
    assert "rank 1 on node 0 was killed (SIGKILL)" in output and "restarts: 1" in output
    for rank, note in enumerate(notes):
        assert note.counts[f"set_device cuda:{rank}"] == {
            "distributed/devices.py:open_gpus": 1,
            "distributed/group.py:_bind": 1,
        }


def test_a_gpu_that_fails_is_given_a_new_process(ranks: Ranks) -> None:
    (ranks.folder / "fails").touch()
    notes, output = ranks.run("failing", "--deterministic")
    assert all(note.environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" for note in notes)
    assert "CUDA error: unspecified launch failure" in output
    assert "(generation 2)" in output and "restarts: 1" in output


def test_the_rank_whose_kernel_is_stuck_is_named(ranks: Ranks) -> None:
    """Its host waits for it a step later, where hosts wait for others too; named was who had gone further."""
    (ranks.folder / "sticks").touch()
    notes, output = ranks.run("sticking", "--hang-timeout", patient(4))
    assert notes and re.search(
        r"hang: rank 1 on node 0 \(.*\) .+ for .* s \(phase forward \(kernel\), step \d",
        output,
    )
    assert "hang: rank 0" not in output and "restarts: 1" in output


def test_gpus_that_are_gone_in_a_later_generation_are_waited_for_and_no_cpu_is_taken(ranks: Ranks) -> None:
    """--device auto went on on the CPU, and with fewer GPUs than ranks the job ended with 2."""
    (ranks.folder / "loses").touch()
    flags = (*FLAGS, "--device", "auto", "--max-restarts", 2, "--run-dir", "gone-run")
    command = played_gpu.command("launch", "--nproc", 2, *flags)
    environment = played_gpu.environment(ranks.folder / "gone-notes", 2)
    try:
        code, output = ranks.processes.run(command, cwd=ranks.folder, env=environment)
    finally:
        (ranks.folder / "gone").unlink(missing_ok=True)
    assert code == 200 and "--max-restarts 2" in output, output
    assert "(cuda)" in output and "(cpu)" not in output and "on the CPU" not in output, output
    assert "GPUs that this node trained on have disappeared" in output and "(generation 3)" in output


LOOP = program_text("gpu_branches_loop")


def test_no_step_of_a_custom_loop_makes_the_host_wait_for_the_gpu(processes: Any, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    environment = played_gpu.environment(tmp_path) | {"TANDEM_RUN_DIR": "run"}
    code, said = processes.run([sys.executable, "loop.py"], cwd=tmp_path, env=environment)
    assert code == 0, said
    counts = json.loads((tmp_path / "notes.json").read_text())
    passed = {"distributed/consensus.py:drain", "data/fetch.py:fetch"}
    often = {place: n for place, n in counts["wait"].items() if n >= STEPS and place not in passed}
    assert not often, often
