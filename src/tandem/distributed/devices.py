"""The devices of this rank: its GPUs and its CPU threads."""

import contextlib
import logging
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

from tandem.config.slices import ComputeConfig
from tandem.distributed.peers import is_gpu_failure
from tandem.distributed.position import Position
from tandem.errors import ConfigError, GpuLostError
from tandem.process import control_groups
from tandem.text import first_line

# Bind a rank to the CPUs close to its GPU: on a NUMA host, memory of other nodes is slower.

log = logging.getLogger("tandem.run")


def bind_to_node(devices: Iterable[torch.device], root: Path = Path("/")) -> None:
    """Let all threads of this process run only on the CPUs of its GPUs' NUMA nodes.

    The kernel lists these CPUs (`/sys/bus/pci/devices/ADDRESS/local_cpulist`); those that the process may not
    use now are omitted. Without a GPU or a list, this only logs a warning.
    """
    before = os.sched_getaffinity(0)
    nearby = [_cpus_near(device, root) for device in devices if device.type == "cuda"]
    there = before & set().union(*(cpus for cpus in nearby if cpus is not None))
    if not nearby or None in nearby or not there:
        why = (
            "there is no GPU" if not nearby else "the kernel does not report which CPUs are close to the GPU"
        )
        log.warning("--numa-binding node has no effect: %s", why)
        return
    os.sched_setaffinity(0, there)
    # sched_setaffinity() binds a single thread. Later threads inherit that, but torch and CUDA have already
    # started some.
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # the thread has just ended
            # A thread that a library has bound to other CPUs keeps them.
            if os.sched_getaffinity(int(thread)) == before:
                os.sched_setaffinity(int(thread), there)
    log.info("bound to %d of %d CPUs, those of the GPU's NUMA node", len(there), len(before))


def _cpus_near(device: torch.device, root: Path) -> set[int] | None:
    found = torch.cuda.get_device_properties(device)
    try:
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"  # type: ignore[attr-defined]
        return cpus_of((root / "sys/bus/pci/devices" / address / "local_cpulist").read_text())
    except (AttributeError, OSError, ValueError):  # this torch, container or machine does not provide it
        return None


def cpus_of(text: str) -> set[int]:
    """Return the CPUs of a list in the kernel's format, such as `0-3,8`. Raises ValueError."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


DRIVER_FILE = Path("/proc/driver/nvidia/version")
NO_KERNEL = re.compile(r"(\S+) does not have a deterministic implementation")
"""From torch's alertNotDeterministic, aten/src/ATen/Context.cpp."""
NO_GPU = ("Found no NVIDIA driver", "No CUDA GPUs are available")
UNLIMITED = 1 << 20


def choose_devices(
    wanted: str, local_rank: int, each: int = 1, had_gpu: bool = False
) -> tuple[torch.device, ...]:
    """Return this rank's `each` devices for `auto`, `cpu` or `cuda`. Raises ConfigError if they are unusable.

    Local rank 0 gets the first `each` GPUs, local rank 1 the next ones. A CPU is returned `each` times.
    `had_gpu`: ranks of this node have trained on GPUs before. A missing GPU has then failed, which raises
    GpuLostError instead of falling back to a CPU.
    """
    if wanted == "cpu":
        return (torch.device("cpu"),) * each
    unusable = GpuLostError if had_gpu else ConfigError
    count = torch.cuda.device_count()
    why = why_no_gpu(DRIVER_FILE) if count == 0 else ""
    if wanted == "auto" and count == 0 and not had_gpu:
        # All ranks of a node see the same GPUs, so one line is enough.
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
    """Return torch's reason why it sees no GPU although there is a driver, for example a too old driver.

    "" if nothing is wrong: there is no driver, this torch or container is for CPUs, or CUDA_VISIBLE_DEVICES
    selects the visible GPUs.
    """
    if "CUDA_VISIBLE_DEVICES" in os.environ or torch.version.cuda is None or not driver.exists():
        return ""
    reason = _why_not_begun()
    return "" if reason.startswith(NO_GPU) else reason


def why_refused(devices: Sequence[torch.device]) -> str:
    """Return why CUDA cannot compute on GPUs that the driver lists, with a remedy; "" if it can.

    The driver may be too old for this torch, or this torch may have no code for the GPU. Without this check,
    the first kernel would fail, like broken hardware. Raises errors that a new process may not have.
    """
    if reason := _why_not_begun():
        if reason.startswith(NO_GPU) and not DRIVER_FILE.exists():
            return ""
        return (
            f"CUDA cannot start: {reason}; the driver is {driver_version() or 'unknown'}, this torch is for "
            f"CUDA {torch.version.cuda}: update the driver, or install a torch built for it"
        )
    archs: list[str] = []
    with contextlib.suppress(AttributeError):  # torch for CPUs
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
    """Return the first sentence of CUDA's error when it starts in this process; "" if it starts.

    Raises errors that a new process may fix.
    """
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # AssertionError is from torch for CPUs
        if is_gpu_failure(error):
            raise
        return str(error).partition(". ")[0].strip() or type(error).__name__
    return ""


def has_code_for(capability: tuple[int, int], archs: Sequence[str]) -> bool:
    """Return True if a torch built for `archs` ("sm_86", "compute_90") can compute on this GPU.

    Machine code (sm) runs on GPUs with the same major and an equal or larger minor number; PTX (compute) runs
    on all newer GPUs. Code with a suffix ("sm_90a") runs only on that model.
    """
    for kind, number, only in re.findall(r"(sm|compute)_(\d+)([a-z]?)", " ".join(archs)):
        has = divmod(int(number), 10)
        if capability == has or (
            not only and capability > has and (kind == "compute" or capability[0] == has[0])
        ):
            return True
    return False


def driver_version() -> str:
    """Return the version of NVIDIA's kernel module, such as "580.65.06"; "" if there is none."""
    try:
        first = DRIVER_FILE.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return ""
    found = re.search(r"\b\d{3}\.\d[\d.]*", first)
    return found[0] if found else first


def compute_deterministically() -> None:
    """Use only deterministic kernels from now on; call this before the first kernel on a GPU.

    For an operation without one, torch raises a RuntimeError that names it. Uninitialized memory is not
    filled, as torch would do by default, because tandem never reads it.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # A benchmark may choose another algorithm in each process, and other algorithms compute other bits.
    torch.backends.cudnn.benchmark = False


def not_deterministic(error: BaseException) -> ConfigError | None:
    """Return a one-line error if `error` is torch's for a missing deterministic kernel; None otherwise."""
    found = NO_KERNEL.match(str(error)) if isinstance(error, RuntimeError) else None
    return found and ConfigError(
        f"--deterministic: {found[1]} has no deterministic kernel on this device; use another operation, or "
        "omit --deterministic (verify-resume sets it on GPUs)"
    )


def open_gpus(compute: ComputeConfig, local_rank: int) -> None:
    """Prepare this rank's GPUs before they are needed: CUDA contexts and the matrix library.

    Later results are the same as without this call. Does nothing on CPUs.
    """
    if compute.device == "cpu" or not torch.cuda.device_count():
        return
    devices = choose_devices(compute.device, local_rank, compute.devices_per_rank)
    # cuBLAS reads its setting when it starts, so this comes before the first product.
    if compute.deterministic:
        compute_deterministically()
    torch.cuda.set_device(devices[0])  # otherwise there would also be a context on the first GPU
    for device in devices:
        # A product of any size makes cuBLAS create its handle and workspace.
        torch.mm(*(torch.ones(8, 8, device=device) for _ in range(2)))
        torch.cuda.synchronize(device)


def set_threads(wanted: Literal["auto"] | int, position: Position) -> int:
    """Set the CPU threads of this rank to `--threads`, or to the cores available to it."""
    threads = cores_of(position) if wanted == "auto" else int(wanted)
    torch.set_num_threads(threads)
    return threads


def cores_of(position: Position) -> int:
    """Return the cores available to this rank: its share of those that the host's processes may use."""
    cores = min(len(os.sched_getaffinity(0)), quota_of(Path("/")))
    # Simulated nodes share a host, so the ranks of all of them count.
    return max(1, cores // position.ranks_on_host)


def quota_of(root: Path) -> int:
    """Return the whole cores that this process's control groups allow, at least 1; UNLIMITED without a limit.

    A container's limit (`--cpus 2`, `resources.limits.cpu`) is CPU time, so all cores are still visible.
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
            # "max" (version 2) and -1 (version 1) mean that there is no limit. The limit of a parent applies
            # as well, so the lowest one counts.
            if quota not in ("max", "-1"):
                most = min(most, int(quota) / int(period))
    # The value is rounded down: once a quota is used up, the kernel stops all threads of the group.
    return max(1, int(most))


EXACT_SIZE = 256
LARGEST_ENTRY = 8
"""The largest entry with which sums of EXACT_SIZE integer products are exact in float32 and TF32."""


def product_problem(device: torch.device) -> str:
    """Multiply two matrices whose product is exact on any device; return what is wrong with it, or "".

    The sums of the product's rows and columns follow from the factors without it (Huang and Abraham, 1984).
    """
    drawn = torch.Generator().manual_seed(1)
    entries = -LARGEST_ENTRY, LARGEST_ENTRY + 1
    shape = EXACT_SIZE, EXACT_SIZE
    one, other = (torch.randint(*entries, shape, generator=drawn, device="cpu").float() for _ in range(2))
    try:
        product = torch.matmul(one.to(device), other.to(device)).cpu().double()
    except RuntimeError as error:  # CUDA's errors have no other type
        return f"{device} cannot multiply matrices: {first_line(error)}"
    columns = product.sum(0) != one.double().sum(0) @ other.double()
    rows = product.sum(1) != one.double() @ other.double().sum(1)
    wrong = int(columns.sum() + rows.sum())
    if not wrong:
        return ""
    return f"{device} multiplies wrongly: {wrong} of {2 * EXACT_SIZE} sums of an exact product differ"
