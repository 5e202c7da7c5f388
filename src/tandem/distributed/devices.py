"""What this rank computes on: its GPUs, and its CPU threads."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

import torch

from tandem.config.slices import ComputeConfig
from tandem.distributed.position import Position
from tandem.errors import ConfigError

log = logging.getLogger("tandem.run")

DRIVER_FILE = Path("/proc/driver/nvidia/version")
NO_GPU = ("Found no NVIDIA driver", "No CUDA GPUs are available")
UNLIMITED = 1 << 20


def choose_devices(wanted: str, local_rank: int, each: int = 1) -> tuple[torch.device, ...]:
    """`auto`, `cpu` or `cuda` -> this rank's `each` devices; ConfigError where they are not there.

    Local rank 0 has the first `each` GPUs, local rank 1 the next. A CPU counts as often as it is asked for.
    """
    if wanted == "cpu":
        return (torch.device("cpu"),) * each
    count = torch.cuda.device_count()
    why = why_no_gpu(DRIVER_FILE) if count == 0 else ""
    if wanted == "auto" and count == 0:
        if why and local_rank == 0:
            log.warning("training on the CPU, because torch cannot use the GPU here: %s", why)
        return (torch.device("cpu"),) * each
    if count == 0:
        because = f" ({why})" if why else ""
        raise ConfigError(f"--device cuda: torch sees no CUDA device here{because}; use --device cpu or auto")
    if (local_rank + 1) * each > count:
        what = "has no GPU" if each == 1 else f"has no {each} GPUs of its own"
        fits = f"use --nproc {count // each}" if count >= each else f"use --devices-per-rank {count}"
        raise ConfigError(f"local rank {local_rank} {what}: torch sees {count}; {fits}, or --device cpu")
    return tuple(torch.device("cuda", local_rank * each + index) for index in range(each))


def why_no_gpu(driver: Path) -> str:
    """Why torch sees no GPU where there is a driver for one, as torch says it: the driver is too old, say.

    "" where nothing is wrong: there is no driver, this torch or container is one for CPUs, or somebody has
    chosen which GPUs are seen.
    """
    if "CUDA_VISIBLE_DEVICES" in os.environ or torch.version.cuda is None or not driver.exists():
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        said = str(error).partition(". ")[0].strip()
        return "" if said.startswith(NO_GPU) else said
    return ""


def compute_deterministically() -> None:
    """From now on only kernels that give the same bits each time; to be called before the first of a GPU's.

    Where there is none, torch raises a RuntimeError that names the operation. Fresh memory is not filled, as
    torch would: nothing of ours reads it.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def open_gpus(compute: ComputeConfig, local_rank: int) -> None:
    """Have this rank's GPUs ready before they are needed: their contexts, and the library of products.

    What is computed after it is the same as without. Nothing to do on CPUs.
    """
    if compute.device == "cpu" or not torch.cuda.device_count():
        return
    devices = choose_devices(compute.device, local_rank, compute.devices_per_rank)
    if compute.deterministic:
        compute_deterministically()
    torch.cuda.set_device(devices[0])  # else there would be a context on the first GPU as well
    for device in devices:
        torch.mm(*(torch.ones(8, 8, device=device) for _ in range(2)))
        torch.cuda.synchronize(device)


def set_threads(wanted: Literal["auto"] | int, position: Position) -> int:
    """CPU threads of this rank: what `--threads` says, or the cores it can count on."""
    threads = cores_of(position) if wanted == "auto" else int(wanted)
    torch.set_num_threads(threads)
    return threads


def cores_of(position: Position) -> int:
    """The cores that this rank can count on: its share of those that the processes of its host may use."""
    cores = min(len(os.sched_getaffinity(0)), quota_of(Path("/")))
    return max(1, cores // position.ranks_on_host)


def quota_of(root: Path) -> int:
    """Whole cores that this process's control groups let it use, at least 1; very many without a limit.

    A container's limit (`--cpus 2`, `resources.limits.cpu`) is time, not cores: all of them can be seen.
    """
    most = float(UNLIMITED)
    for folder, version in _groups(root):
        with contextlib.suppress(OSError, ValueError):
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = (
                    (folder / f"cpu.cfs_{each}_us").read_text().strip() for each in ("quota", "period")
                )
            if quota not in ("max", "-1"):
                most = min(most, int(quota) / int(period))
    return max(1, int(most))


def _groups(root: Path) -> Iterator[tuple[Path, int]]:
    """(folder, version) of this process's groups for CPU time, and of all above them."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            mount = root / "sys/fs/cgroup" / (controllers and "cpu")
            path = PurePosixPath(name.lstrip("/"))
            for each in (path, *path.parents) if name != "/" else (path,):
                yield mount / each, 1 if controllers else 2


def allow_tf32() -> None:
    """Products of fp32 matrices in TF32 on GPUs: 10 bits of mantissa for 8 times the speed."""
    torch.set_float32_matmul_precision("high")
