"""What this rank computes on: its GPUs, and its CPU threads."""

import contextlib
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from tandem.config.slices import ComputeConfig
from tandem.distributed.gpu_failures import is_gpu_failure
from tandem.distributed.position import Position
from tandem.errors import ConfigError, GpuLostError
from tandem.process import control_groups

log = logging.getLogger("tandem.run")

DRIVER_FILE = Path("/proc/driver/nvidia/version")
NO_KERNEL = re.compile(r"(\S+) does not have a deterministic implementation")
"""torch's alertNotDeterministic, aten/src/ATen/Context.cpp."""
NO_GPU = ("Found no NVIDIA driver", "No CUDA GPUs are available")
UNLIMITED = 1 << 20


def choose_devices(
    wanted: str, local_rank: int, each: int = 1, had_gpu: bool = False
) -> tuple[torch.device, ...]:
    """`auto`, `cpu` or `cuda` -> this rank's `each` devices; ConfigError where they cannot be used.

    Local rank 0 has the first `each` GPUs, local rank 1 the next. A CPU counts as often as it is asked for.
    `had_gpu`: ranks of this node have trained on GPUs before. What is missing then has failed: GpuLostError,
    and never a CPU instead.
    """
    if wanted == "cpu":
        return (torch.device("cpu"),) * each
    unusable = GpuLostError if had_gpu else ConfigError
    count = torch.cuda.device_count()
    why = why_no_gpu(DRIVER_FILE) if count == 0 else ""
    if wanted == "auto" and count == 0 and not had_gpu:
        if why and local_rank == 0:
            log.warning("training on the CPU, because torch cannot use the GPU here: %s", why)
        return (torch.device("cpu"),) * each
    if count == 0:
        because = f" ({why})" if why else ""
        raise unusable(
            f"--device {wanted}: torch sees no CUDA device here{because}; use --device cpu or auto"
            if not had_gpu
            else f"the GPUs that this node trained on have disappeared{because}; see nvidia-smi and dmesg"
        )
    if (local_rank + 1) * each > count:
        what = "has no GPU" if each == 1 else f"has no {each} GPUs of its own"
        fits = f"use --nproc {count // each}" if count >= each else f"use --devices-per-rank {count}"
        raise unusable(f"local rank {local_rank} {what}: torch sees {count}; {fits}, or --device cpu")
    devices = tuple(torch.device("cuda", local_rank * each + index) for index in range(each))
    if refusal := why_refused(devices):
        raise unusable(f"--device {wanted}: {refusal}; or use --device cpu")
    return devices


def why_no_gpu(driver: Path) -> str:
    """Why torch sees no GPU where there is a driver for one, as torch says it: the driver is too old, say.

    "" where nothing is wrong: there is no driver, this torch or container is one for CPUs, or somebody has
    chosen which GPUs are seen.
    """
    if "CUDA_VISIBLE_DEVICES" in os.environ or torch.version.cuda is None or not driver.exists():
        return ""
    said = _why_not_begun()
    return "" if said.startswith(NO_GPU) else said


def why_refused(devices: Sequence[torch.device]) -> str:
    """Why CUDA will not compute on GPUs that the driver counts, and what to do; "" where it will.

    The driver may be too old for this torch, or the GPU one that this torch has no code for: both are found
    by the first kernel, too late to be told from a failure. Raises what a new process may fix.
    """
    if said := _why_not_begun():
        if said.startswith(NO_GPU) and not DRIVER_FILE.exists():
            return ""
        return (
            f"CUDA cannot start: {said}; the driver is {driver_version() or 'unknown'}, this torch is for "
            f"CUDA {torch.version.cuda}: update the driver, or install a torch built for it"
        )
    archs: list[str] = []
    with contextlib.suppress(AttributeError):  # a torch for CPUs
        archs = torch.cuda.get_arch_list()
    for device in devices:
        capability = torch.cuda.get_device_capability(device)
        if archs and not has_code_for(capability, archs):
            return (
                f"{device} ({torch.cuda.get_device_name(device)}) has compute capability "
                f"{'.'.join(map(str, capability))}, but this torch ({torch.__version__}) only supports "
                f"{', '.join(archs)}; install a torch that supports it"
            )
    return ""


def _why_not_begun() -> str:
    """What CUDA says of its start in this process, the first sentence; "" where it starts.

    Raises what a new process may fix.
    """
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # the second in a torch for CPUs
        if is_gpu_failure(error):
            raise
        return str(error).partition(". ")[0].strip() or type(error).__name__
    return ""


def has_code_for(capability: tuple[int, int], archs: Sequence[str]) -> bool:
    """Whether a torch with code for `archs` ("sm_86", "compute_90") computes on a GPU of this capability.

    Machine code runs on GPUs of the same major number and no smaller minor one; PTX on all that are newer.
    Code for one model alone ("sm_90a") is that model's.
    """
    for kind, number, only in re.findall(r"(sm|compute)_(\d+)([a-z]?)", " ".join(archs)):
        has = divmod(int(number), 10)
        if capability == has or (
            not only and capability > has and (kind == "compute" or capability[0] == has[0])
        ):
            return True
    return False


def driver_version() -> str:
    """Of NVIDIA's kernel module, such as "580.65.06"; "" where there is none."""
    try:
        first = DRIVER_FILE.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return ""
    found = re.search(r"\b\d{3}\.\d[\d.]*", first)
    return found[0] if found else first


def compute_deterministically() -> None:
    """From now on only kernels that give the same bits each time; to be called before the first of a GPU's.

    Where there is none, torch raises a RuntimeError that names the operation. Fresh memory is not filled, as
    torch would: nothing of ours reads it.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def not_deterministic(error: BaseException) -> ConfigError | None:
    """The one line for torch's error of an operation that has no deterministic kernel; None for any other."""
    found = NO_KERNEL.match(str(error)) if isinstance(error, RuntimeError) else None
    return found and ConfigError(
        f"--deterministic: {found[1]} has no deterministic kernel on this device; use another operation, or "
        "omit --deterministic (verify-resume sets it on GPUs)"
    )


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
    for folder, version in control_groups(root, "cpu"):
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


def allow_tf32() -> None:
    """Products of fp32 matrices in TF32 on GPUs: 10 bits of mantissa for 8 times the speed."""
    torch.set_float32_matmul_precision("high")
