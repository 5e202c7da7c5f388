"""Real errors of real gloo processes mean a lost peer; errors of a task that only sound like it do not."""

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from patience import patient
from program_files import program_text
from tandem.distributed.compression import Half
from tandem.distributed.group import ProcessGroup
from tandem.distributed.peers import is_peer_loss
from tandem.distributed.position import Position

pytestmark = pytest.mark.multi

LIMIT_SECONDS = 60.0
TIMEOUT = timedelta(seconds=1)

SOUNDS_LIKE = [
    RuntimeError("cannot restore the vocabulary"),
    RuntimeError("the feature store timed out"),
    RuntimeError("socket of the tokenizer: connection reset, broken pipe"),
    RuntimeError("my gloo and nccl settings are wrong: Connection closed by peer"),
    RuntimeError("size mismatch in store.weight"),
    RuntimeError("Got the following error when running the callback: KeyError: gloo"),
    RuntimeError("NCCL AllReduce failed: invalid argument (run with NCCL_DEBUG=WARN for details)"),
    RuntimeError("NCCL Send failed in scatter: invalid usage (run with NCCL_DEBUG=WARN for details)"),
    RuntimeError("NCCL AllReduce failed: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
    RuntimeError("my check says: NCCL AllReduce failed: remote process exited"),
    ValueError("[/x/gloo/transport/tcp/pair.cc:1] Connection closed by peer"),
    ConnectionResetError("connection reset by peer"),
]


REMOTE = "remote process exited or there was a network error \nNCCL Last Error: Connection closed"
NCCL2 = [
    f"NCCL AllReduce failed: {REMOTE}",
    f"NCCL Send failed in all_to_all_v_single: {REMOTE}",
    "NCCL GroupEnd failed: unhandled system error (run with NCCL_DEBUG=INFO for details) \nNCCL Last Error: ",
    "NCCL Broadcast failed: internal error - please report this issue to the NCCL developers \n",
    f"NCCL commInitRankConfig failed during reconfigure: {REMOTE}",
    f"NCCL Async Error: {REMOTE}",
    f"Failed to initialize NCCL communicator: {REMOTE}",
    "Failed to get NCCL unique ID: unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "NCCL operation timed out",
    "NCCL communicator was aborted after a previous error",
]
"""What torch 2.15's newer group raises, as RuntimeErrors (nccl2/ProcessGroupNCCL.cpp)."""


@pytest.mark.parametrize("error", SOUNDS_LIKE, ids=str)
def test_an_error_of_the_task_is_not_taken_for_a_lost_peer(error: Exception) -> None:
    assert not is_peer_loss(error, 2)


def test_typed_errors_and_nccl_messages_mean_a_lost_peer_but_not_in_a_world_of_one() -> None:
    lost = [
        dist.DistBackendError("x"),
        dist.DistNetworkError("x"),
        dist.DistStoreError("x"),
        RuntimeError(
            "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network"
        ),
        RuntimeError("NCCL communicator was aborted on rank 1."),
        RuntimeError("NCCL communicator encountered error set by ProcessGroupNCCL: timeout"),
        RuntimeError(
            "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5) ran for 600 s"
        ),
        RuntimeError(
            "[PG ID 0 PG GUID 0(default_pg) Rank 0] Watchdog caught collective operation timeout: W"
        ),
        RuntimeError("Operation timed out!"),
        *(RuntimeError(text) for text in NCCL2),
        RuntimeError(
            "Got the following error when running the callback: RuntimeError: Got the following error when "
            "running the callback: RuntimeError: [/x/gloo/transport/tcp/pair.cc:1] Connection closed by peer"
        ),
    ]
    assert [is_peer_loss(error, 2) for error in lost] == [True] * len(lost)
    assert not any(is_peer_loss(error, 1) for error in lost)


def reduce(size: int) -> None:
    dist.all_reduce(torch.ones(100))


def broadcast(size: int) -> None:
    dist.broadcast(torch.ones(100), src=size - 1)


def gather(size: int) -> None:
    work = dist.all_gather_into_tensor(torch.empty(100 * size), torch.ones(100), async_op=True)
    assert work is not None
    work.wait()


def scatter(size: int) -> None:
    dist.reduce_scatter_tensor(torch.empty(100), torch.ones(100 * size))


def backward(size: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


def compressed(size: int) -> None:
    """The error comes through a callback of DDP's hook, which puts words of its own before it."""
    module = torch.nn.Module()
    module.model, module.carrier = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.zeros(2))
    module.forward = lambda x: module.model(x).sum() + module.carrier.sum()
    model = torch.nn.parallel.DistributedDataParallel(module)
    Half(ProcessGroup(Position(world_size=size), torch.device("cpu")), "bf16").attach(
        model, module.carrier, {}
    )
    for _ in range(2):
        model(torch.ones(2, 4)).backward()


def read_store(size: int) -> None:
    dist.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=1))


def work(rank: int, size: int, port: int, collective: Callable[[int], None], end: str, answer: Any) -> None:
    """The last rank goes in the way of `end`; each of the others tells what `collective` raised."""
    torch.set_num_threads(1)
    place = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=TIMEOUT * 10)
    dist.init_process_group("gloo", store=place, rank=rank, world_size=size, timeout=TIMEOUT)
    dist.barrier()
    if rank == size - 1:
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "closed":
            dist.destroy_process_group()
        time.sleep(LIMIT_SECONDS)
    try:
        collective(size)
    except Exception as error:
        answer.put((is_peer_loss(error, size), is_peer_loss(error, 1), f"{type(error).__name__}: {error}"))
    time.sleep(LIMIT_SECONDS)  # nobody's end but the last rank's may be what the others see


CASES = [
    ("killed", reduce, 2), ("killed", backward, 2), ("killed", broadcast, 3), ("killed", scatter, 3),
    ("closed", gather, 2), ("closed", backward, 3), ("killed", compressed, 2), ("silent", compressed, 2),
    ("silent", reduce, 2), ("silent", backward, 2), ("silent", read_store, 2),
]  # fmt: skip


@pytest.mark.parametrize("end, collective, size", CASES, ids=lambda value: getattr(value, "__name__", value))
def test_what_gloo_and_the_store_raise_means_a_lost_peer(
    end: str, collective: Callable[[int], None], size: int, free_port: int
) -> None:
    context = torch.multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    arguments = (size, free_port, collective, end, answer)
    ranks = [context.Process(target=work, args=(rank, *arguments)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    try:
        deadline = time.monotonic() + patient(LIMIT_SECONDS)
        for _ in range(size - 1):
            while answer.empty():
                assert time.monotonic() < deadline, "no rank noticed"
                time.sleep(0.01)
            lost, lost_alone, text = answer.get()
            assert lost and not lost_alone, text
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


TASK = program_text("peer_loss_task")


def test_a_tasks_error_that_sounds_like_the_store_ends_1_with_its_traceback(
    processes: Any, tmp_path: Path
) -> None:
    (tmp_path / "forgetful.py").write_text(TASK)
    code, output = processes.run(
        [sys.executable, "-m", "tandem", "launch", "--task", "forgetful.py:Forgetful", "--batch-size", "4"]
        + ["--device", "cpu", "--metrics", "0", "--run-dir", "run"],
        cwd=tmp_path,
    )
    assert code == 1, output
    assert "Traceback" in output and "cannot restore the vocabulary" in output
    assert [line for line in output.splitlines() if "restart" in line.lower()] == []
