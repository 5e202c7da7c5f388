"""Checks of `tandem doctor` on one machine: shared memory, the run's volume, the time to save, GPUs."""

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from tandem.config import Settings
from tandem.distributed.devices import DRIVER_FILE, why_no_gpu, why_refused
from tandem.launch.connectivity import ConnectivityProblem
from tandem.log import counted
from tandem.run.directory import RunDir
from tandem.text import format_duration
from tandem.timeouts import CLOCK_SKEW_SECONDS, LEAVE_SECONDS

MIB = 2**20
ENOUGH_SHARED_BYTES = 256 * MIB
"""Docker's default is 64 MiB, which a few batches of images in loader processes fill."""
ENOUGH_SPACE_BYTES = 256 * MIB
TRIED_BYTES = MIB


def findings(settings: Settings) -> Iterator[ConnectivityProblem]:
    """Yield all checks that need no other machine."""
    yield shared_memory(Path("/dev/shm"), settings.data.workers)
    run_dir = settings.run.run_dir
    saves = list[dict[str, object]]()
    run = RunDir(run_dir or "runs")
    if not run.is_here:
        yield ConnectivityProblem("run volume", "pass", f"{run_dir} is an object store, not checked here")
    else:
        saves = [line for line in run.events() if line.get("kind") == "checkpoint"]
        yield from volume(run.folder, max((_number(each, "bytes") for each in saves), default=0.0))
    yield grace(settings.launch.shutdown_timeout, [_number(each, "seconds") for each in saves])
    yield gpus(settings.compute.device)


def shared_memory(folder: Path, workers: Literal["auto"] | int) -> ConnectivityProblem:
    """Check the space in shared memory, which loader processes and NCCL use; tandem itself does not."""
    name = "shm"
    remedy = "--shm-size=1g or --ipc=host (Docker), or mount a medium: Memory volume there (Kubernetes)"
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return ConnectivityProblem(name, "warn", f"{folder}: {error.strerror}", remedy)
    text = f"{folder} has {free / MIB:,.0f} MiB free"
    if free < ENOUGH_SHARED_BYTES and workers == "auto":
        return ConnectivityProblem(name, "warn", f"{text}; --workers auto", f"{remedy}, or --workers 0")
    if free < ENOUGH_SHARED_BYTES and workers:
        processes = "1 loader process" if workers == 1 else f"{workers} loader processes"
        return ConnectivityProblem(name, "warn", f"{text}; {processes}", f"{remedy}, or --workers 0")
    if free < ENOUGH_SHARED_BYTES:
        return ConnectivityProblem(name, "warn", text, remedy)
    return ConnectivityProblem(name, "pass", text)


def volume(run_dir: Path, save_bytes: float) -> Iterator[ConnectivityProblem]:
    """Check the run's volume: owner, space, and a small file written like a checkpoint.

    A directory that does not exist yet is judged by its nearest existing parent.
    """
    there = next(each for each in (run_dir.absolute(), *run_dir.absolute().parents) if each.exists())
    # First, because access(2) fails on a read-only mount as well, where chown does not help.
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        yield ConnectivityProblem(
            "run volume", "fail", f"{there} is read-only", "mount it for writing, or use another --run-dir"
        )
        return
    owner = _owner(there, is_run=there == run_dir.absolute())
    yield owner
    if owner.state == "fail":
        return
    usage = shutil.disk_usage(there)
    text = f"{there}: {usage.free / MIB:,.0f} of {usage.total / MIB:,.0f} MiB are free"
    remedy = "free space, prune (`tandem checkpoints prune RUN_DIR`), or use another --run-dir"
    text += f", a checkpoint needs {save_bytes / MIB:,.1f}" if save_bytes else ""
    if usage.free < max(save_bytes, 2 * TRIED_BYTES):
        yield ConnectivityProblem("space", "fail", text, remedy)
        return
    # A new checkpoint is complete before an old one is removed, so both need space.
    if usage.free < max(2 * save_bytes, ENOUGH_SPACE_BYTES):
        yield ConnectivityProblem("space", "warn", text, remedy)
    else:
        yield ConnectivityProblem("space", "pass", text)
    yield _written(there)


def _owner(folder: Path, is_run: bool) -> ConnectivityProblem:
    seen = folder.stat()
    me = os.geteuid()
    mode = stat.S_IMODE(seen.st_mode)
    who = f"{folder} belongs to user {seen.st_uid}, mode {mode:o}; this process runs as user {me}"
    # Files are written as the effective user; access(2) tests the real one by default.
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        remedy = f"`chown {me}` it (Kubernetes: fsGroup), run as user {seen.st_uid}, or another --run-dir"
        return ConnectivityProblem("owner", "fail", f"{who}, who cannot write there", remedy)
    if is_run and seen.st_uid != me:
        remedy = f"run as user {seen.st_uid}, who may otherwise be unable to read the files written"
        return ConnectivityProblem("owner", "warn", who, remedy)
    # Only the run's directory: a parent such as /tmp is writable for all on purpose.
    if is_run and mode & stat.S_IWOTH:
        return ConnectivityProblem("owner", "warn", f"{who}: anyone can write there", f"`chmod o-w {folder}`")
    return ConnectivityProblem("owner", "pass", who)


def _written(folder: Path) -> ConnectivityProblem:
    """Write a file in the way a checkpoint is committed: write, fsync, rename, fsync of the directory."""
    name = "run volume"
    try:
        # On the volume itself, because rename(2) works only within one file system.
        with tempfile.TemporaryDirectory(prefix=".tandem-doctor-", dir=folder) as made:
            first = Path(made) / "new"
            last = Path(made) / "committed"
            # Two clocks: this one is compared with the file server's, and the monotonic one measures.
            began = time.time()
            before = time.monotonic()
            with first.open("wb") as file:
                file.write(b"\1" * TRIED_BYTES)
                file.flush()
                os.fsync(file.fileno())
            first.rename(last)
            # A rename is durable only after fsync of the directory (fsync(2)), which some mounts reject.
            descriptor = os.open(made, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            seconds = time.monotonic() - before
            written = last.stat().st_mtime
    except OSError as error:
        remedy = (
            "checkpoints need write, fsync and rename there; check mount options, or use another --run-dir"
        )
        return ConnectivityProblem(name, "fail", f"{folder}: {error.strerror or error}", remedy)
    # A clock difference is certain only if the file's time is outside the interval in which it was written.
    ahead = began - written if began > written else min(0.0, began + seconds - written)
    if abs(ahead) > CLOCK_SKEW_SECONDS:
        when = "before" if ahead > 0 else "after"
        text = f"files in {folder} are dated {abs(ahead):.0f} s {when} this clock"
        return ConnectivityProblem(
            "clock", "warn", text, "synchronize the clocks of this node and its file server"
        )
    return ConnectivityProblem(
        name, "pass", f"{folder}: 1 MiB written, synced and renamed in {format_duration(seconds)}"
    )


def grace(shutdown_timeout: float, save_seconds: list[float]) -> ConnectivityProblem:
    """Check that a save fits into --shutdown-timeout, by the longest save of this run."""
    name = "grace"
    text = f"--shutdown-timeout {shutdown_timeout:g} s"
    outer = f"the platform's own grace period {shutdown_timeout + LEAVE_SECONDS:g} s or more"
    if not save_seconds:
        return ConnectivityProblem(
            name, "pass", f"{text}; no save of this run has been measured yet; {outer}"
        )
    longest = max(save_seconds)
    text = f"{text}, and the longest of {counted(len(save_seconds), 'save')} took {format_duration(longest)}"
    remedy = f"--shutdown-timeout {max(5, round(3 * longest))}, and the platform's grace period 10 s above it"
    if longest > shutdown_timeout:
        return ConnectivityProblem(name, "fail", text, remedy)
    if 2 * longest > shutdown_timeout:  # one save may be in progress when the signal arrives
        return ConnectivityProblem(name, "warn", text, remedy)
    return ConnectivityProblem(name, "pass", f"{text}; {outer}")


def gpus(device: str) -> ConnectivityProblem:
    """Check that torch can use the GPUs that the driver lists, and that NCCL is available."""
    count = torch.cuda.device_count()
    name = "GPU"
    if count == 0:
        why = why_no_gpu(DRIVER_FILE)
        if why or device == "cuda":
            remedy = "update the driver, or install a torch built for it; --device cpu trains without a GPU"
            return ConnectivityProblem(name, "fail", why or "--device cuda, but torch sees no GPU", remedy)
        return ConnectivityProblem(name, "pass", "none: this node trains on its CPUs")
    if why := refused(count):
        return ConnectivityProblem(
            name, "fail", f"{counted(count, 'GPU')}, but {why}", "--device cpu trains without a GPU"
        )
    version: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
    if not dist.is_nccl_available():
        return ConnectivityProblem(
            name, "fail", f"{counted(count, 'GPU')}, but no NCCL", "install a torch with NCCL"
        )
    nccl = ".".join(map(str, version()))
    return ConnectivityProblem(
        name, "pass", f"{counted(count, 'GPU')}, CUDA {torch.version.cuda}, NCCL {nccl}"
    )


def refused(count: int) -> str:
    """Return why CUDA rejects one of the GPUs that the driver lists; "" if it accepts all."""
    try:
        return why_refused([torch.device("cuda", index) for index in range(count)])
    except RuntimeError as error:  # a new process may fix it
        return str(error).splitlines()[0]


def _number(line: dict[str, object], key: str) -> float:
    value = line.get(key)
    return float(value) if isinstance(value, int | float) else 0.0
