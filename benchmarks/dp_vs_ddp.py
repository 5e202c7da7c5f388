"""Measure on CPUs what tutorials say about DataParallel and DDP: bytes per step, threads, and shares.

    python benchmarks/dp_vs_ddp.py [--only bytes threads shares] [--json benchmarks/results/dp_vs_ddp.json]

bytes: a backward pass of DDP over gloo, compared with a parameter server, to which ranks send gradients and
which returns weights, as DataParallel does. The kernel counts the bytes at the sockets of each process
(TCP_INFO), without headers. The result is the median of several passes.
threads: forward and backward of two replicas, in two threads of one process (DataParallel) and in two
processes (DDP), relative to running one replica after the other. Each replica has one CPU thread.
shares: samples/s of `tandem launch` with two ranks, one of which needs three times as long per sample (it
sleeps, like a host that waits for its device), with equal shares and with 3:1, in turn.
"""

import argparse
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from table import machine, refuse_changes
from tandem.tasks.classification import strided_cnn

PASSES, ROUNDS, STEPS = 7, 3, 100
SIDES = (100, 1000, 3162)  # of a square matrix: 10 thousand, 1 million, 10 million parameters
HERE = Path(__file__).resolve()


class Slow:
    """The task of `shares`: small, and slower by a factor of three on rank 1."""

    def build_model(self) -> nn.Module:
        return nn.Linear(8, 3)

    def build_datasets(self) -> Any:
        from tandem.data.datasets import Datasets, TensorRows

        x = torch.randn(6400, 8, generator=torch.Generator().manual_seed(7))
        return Datasets(TensorRows(x, x[:, :3].argmax(1)), TensorRows(x[:64], x[:64, :3].argmax(1)))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(0.001 * len(batch[0]) * (1 + 2 * dist.get_rank()))
        return functional.cross_entropy(model(batch[0]), batch[1])


def tcp_bytes() -> tuple[int, int]:
    """Return the bytes that this process has sent (acknowledged) and received, over all its TCP sockets."""
    sent = received = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue
        acked, got = struct.unpack_from("<QQ", info, 120)  # tcpi_bytes_acked, tcpi_bytes_received
        sent, received = sent + acked, received + got
    return sent, received


def open_group(rank: int, ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)


def ring_pass(ddp: nn.Module, side: int) -> None:
    ddp(torch.ones(1, side)).sum().backward()


def server_pass(model: nn.Module, side: int) -> None:
    """Send gradients to rank 0, which adds them up, and send weights from rank 0 to each other rank."""
    model(torch.ones(1, side)).sum().backward()
    for parameter in model.parameters():
        gradient, others = parameter.grad, range(1, dist.get_world_size())
        assert gradient is not None
        if dist.get_rank() == 0:
            parts = [torch.empty_like(gradient) for _ in others]
            for work in [dist.irecv(part, src=rank) for part, rank in zip(parts, others, strict=True)]:
                work.wait()
            for work in [dist.isend(parameter.data, dst=rank) for rank in others]:
                work.wait()
        else:
            dist.send(gradient, dst=0)
            dist.recv(parameter.data, src=0)


def bytes_rank(rank: int, ranks: int, port: int, results: Any) -> None:
    open_group(rank, ranks, port)
    for side in SIDES:
        for name in ("ring", "server"):
            model: nn.Module = nn.Linear(side, side, bias=False)
            if name == "ring":
                model = DistributedDataParallel(model)
            step = ring_pass if name == "ring" else server_pass
            step(model, side)
            found = []
            for _ in range(PASSES):
                dist.barrier()
                time.sleep(0.05)  # until what was sent is acknowledged
                before = tcp_bytes()
                step(model, side)
                time.sleep(0.05)
                after = tcp_bytes()
                found.append((after[0] - before[0], after[1] - before[1]))
            sent, received = (int(statistics.median(each[i] for each in found)) for i in (0, 1))
            row = {"way": name, "ranks": ranks, "parameters": side * side, "rank": rank}
            results.put({**row, "sent": sent, "received": received})
    dist.barrier()
    os._exit(0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure_bytes() -> list[dict[str, Any]]:
    """Return the bytes of the busiest rank and the formula's, by method, number of ranks and size."""
    context, rows = mp.get_context("spawn"), []
    for ranks in (2, 4):
        results, port = context.SimpleQueue(), free_port()
        processes = [context.Process(target=bytes_rank, args=(r, ranks, port, results)) for r in range(ranks)]
        for process in processes:
            process.start()
        found = [results.get() for _ in range(ranks * len(SIDES) * 2)]
        for process in processes:
            process.join()
        for way in ("ring", "server"):
            for side in SIDES:
                each = [r for r in found if r["way"] == way and r["parameters"] == side * side]
                size = 4 * side * side
                through = size * (ranks - 1) * (2 / ranks if way == "ring" else 1)
                rows.append(
                    {
                        "way": way,
                        "ranks": ranks,
                        "parameters": side * side,
                        "sent": max(r["sent"] for r in each),
                        "received": max(r["received"] for r in each),
                        "formula": round(through),
                        "all": sum(r["sent"] for r in each),
                    }
                )
                print(rows[-1], flush=True)
    return rows


def make(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if kind == "many small layers":
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(100))), torch.ones(8, 16)
    if kind == "the digits CNN":
        return strided_cnn(), torch.ones(120, 1, 28, 28)
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))), torch.ones(256, 1024)


def passes(kind: str, count: int) -> None:
    model, batch = make(kind)
    for _ in range(count):
        model(batch).sum().backward()


def process_passes(kind: str, count: int, ready: Any, go: Any) -> None:
    torch.set_num_threads(1)
    passes(kind, 3)
    ready.put(True)
    go.wait()
    passes(kind, count)
    os._exit(0)


def measure_threads() -> list[dict[str, Any]]:
    """Return the speedup of two replicas by threads and by processes, relative to one after the other."""
    torch.set_num_threads(1)
    context, rows = mp.get_context("spawn"), []
    for kind, count in (("many small layers", 150), ("the digits CNN", 40), ("four large layers", 8)):
        seconds: dict[str, list[float]] = {"alone": [], "threads": [], "processes": []}
        for _ in range(5):
            passes(kind, 3)
            began = time.perf_counter()
            passes(kind, 2 * count)
            seconds["alone"].append(time.perf_counter() - began)
            threads = [threading.Thread(target=passes, args=(kind, count)) for _ in range(2)]
            began = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seconds["threads"].append(time.perf_counter() - began)
            ready, go = context.SimpleQueue(), context.Event()
            others = [context.Process(target=process_passes, args=(kind, count, ready, go)) for _ in range(2)]
            for process in others:
                process.start()
            for _ in others:
                ready.get()
            began = time.perf_counter()
            go.set()
            for process in others:
                process.join()
            seconds["processes"].append(time.perf_counter() - began)
        faster = {
            way: statistics.median(a / b for a, b in zip(seconds["alone"], seconds[way], strict=True))
            for way in ("threads", "processes")
        }
        rows.append({"model": kind, **{way: round(each, 2) for way, each in faster.items()}})
        rows[-1] |= {"rounds": len(seconds["alone"]), "seconds": seconds}
        print(rows[-1], flush=True)
    return rows


def measure_shares() -> dict[str, Any]:
    """Return samples/s of each kind of shares, by round, and the median ratio to equal shares."""
    rates: dict[str, list[float]] = {"none": [], "3:1": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            for shares in rates:
                run_dir = Path(folder) / f"{number}-{shares.replace(':', '-')}"
                flags = {
                    "--task": f"{HERE}:Slow", "--run-dir": run_dir, "--nproc": 2, "--batch-size": 64,
                    "--steps": STEPS, "--threads": 1, "--device": "cpu", "--metrics": 0,
                    "--metrics-linger": 0, "--eval-every": "never", "--checkpoint-every": "never",
                    "--batch-shares": shares,
                }  # fmt: skip
                words = [str(word) for pair in flags.items() for word in pair]
                command = [sys.executable, "-m", "tandem", "launch", *words]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                rates[shares].append(json.loads((run_dir / "summary.json").read_text())["samples_per_second"])
    ratios = {
        shares: round(statistics.median(a / b for a, b in zip(each, rates["none"], strict=True)), 2)
        for shares, each in rates.items()
    }
    return {"samples_per_second": rates, "ratio": ratios}


def main() -> None:
    parts = {"bytes": measure_bytes, "threads": measure_threads, "shares": measure_shares}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--json", type=Path, default=HERE.parent / "results" / "dp_vs_ddp.json")
    options = parser.parse_args()
    refuse_changes(options.json)
    found = json.loads(options.json.read_text()) if options.json.exists() else {}
    for name in options.only:
        found[name] = parts[name]()
        print(name, json.dumps(found[name]), flush=True)
        found.setdefault("machines", {})[name] = machine()  # the parts may be taken on different days
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
