"""What this rank computes on: its GPUs, and its CPU threads."""

import os
from typing import Literal

import torch

from tandem.distributed.position import Position
from tandem.errors import ConfigError


def choose_devices(wanted: str, local_rank: int, each: int = 1) -> tuple[torch.device, ...]:
    """`auto`, `cpu` or `cuda` -> this rank's `each` devices; ConfigError where they are not there.

    Local rank 0 has the first `each` GPUs, local rank 1 the next. A CPU counts as often as it is asked for.
    """
    count = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and count == 0):
        return (torch.device("cpu"),) * each
    if count == 0:
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu or auto")
    if (local_rank + 1) * each > count:
        what = "has no GPU" if each == 1 else f"has no {each} GPUs of its own"
        fits = f"use --nproc {count // each}" if count >= each else f"use --devices-per-rank {count}"
        raise ConfigError(f"local rank {local_rank} {what}: torch sees {count}; {fits}, or --device cpu")
    return tuple(torch.device("cuda", local_rank * each + index) for index in range(each))


def compute_deterministically() -> None:
    """From now on only kernels that give the same bits each time; to be called before the first of a GPU's.

    Where there is none, torch raises a RuntimeError that names the operation. Fresh memory is not filled, as
    torch would: nothing of ours reads it.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def set_threads(wanted: Literal["auto"] | int, position: Position) -> int:
    """CPU threads of this rank: what `--threads` says, or the cores it can count on."""
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // position.ranks_on_host) if wanted == "auto" else int(wanted)
    torch.set_num_threads(threads)
    return threads
