"""Checks of `tandem doctor` on one machine: shared memory, the run's volume, the time to save, GPUs."""

import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from tandem.config import Settings
from tandem.distributed.devices import DRIVER_FILE, why_no_gpu, why_refused
from tandem.launch.connectivity import ConnectivityProblem
from tandem.launch.join_rules import ENOUGH_SHARED_BYTES
from tandem.log import pluralize
from tandem.process import nearest_existing
from tandem.run.directory import RunDir
from tandem.text import first_line, format_duration
from tandem.timeouts import CLOCK_SKEW_SECONDS, LEAVE_SECONDS, TOOL_ANSWER_SECONDS

# Check container runtimes for Slurm jobs: Apptainer or Singularity, and Pyxis with Enroot.
#
# A runtime that is not installed has no line.

USER_NAMESPACES = Path("/proc/sys/user/max_user_namespaces")
NO_NAMESPACES = "user namespaces are disabled (user.max_user_namespaces is 0)"
ASK = "ask your cluster administrator to fix it"
ASK_SETUID = "ask your cluster administrator for a setuid installation"
PYXIS_OPTION = "--container-image"

Environment = Mapping[str, str]


def container_findings(
    environ: Environment, namespaces: Path = USER_NAMESPACES
) -> Iterator[ConnectivityProblem]:
    """Yield one line for each container runtime installed here."""
    # Apptainer installs `singularity` as a link to itself, which would be the same line again.
    for name in ("apptainer", "singularity"):
        if program := _program(name, environ):
            yield _apptainer(name, program, environ, namespaces)
            break
    yield from _pyxis(environ, namespaces)


def _apptainer(name: str, program: str, environ: Environment, namespaces: Path) -> ConnectivityProblem:
    works, answer = _answer([program, "--version"], environ)
    if not works:
        return ConnectivityProblem(name, "warn", f"{program} fails: {answer}", ASK)
    # Root and the setuid helper mount images without user namespaces.
    if os.geteuid() and not _has_namespaces(namespaces) and not _is_setuid(name, program):
        return ConnectivityProblem(name, "warn", f"{answer}, and {NO_NAMESPACES}", ASK_SETUID)
    return _placed(name, answer, "slurm/train-apptainer.sbatch", environ)


def _pyxis(environ: Environment, namespaces: Path) -> Iterator[ConnectivityProblem]:
    name = "pyxis"
    srun = _program("srun", environ)
    enroot = _program("enroot", environ)
    works, answer = _answer([enroot, "version"], environ) if enroot else (True, "enroot is not on PATH")
    version = answer if not enroot or not works else f"enroot {answer}"
    helps, options = _answer([srun, "--help"], environ) if srun else (True, "")
    is_loaded = PYXIS_OPTION in options
    # Neither part is installed, so this cluster does not use Pyxis.
    if not enroot and not is_loaded:
        return
    if not works or not helps:
        yield ConnectivityProblem(
            name, "warn", f"{srun if works else enroot} fails: {answer if helps else options}", ASK
        )
    elif not is_loaded:
        missing = f"srun has no {PYXIS_OPTION}" if srun else "srun is not on PATH"
        remedy = "load spank_pyxis.so in Slurm's plugstack.conf, or use `srun enroot start`"
        yield ConnectivityProblem(name, "warn", f"{version}, but {missing}", remedy)
    elif enroot and os.geteuid() and not _has_namespaces(namespaces):
        yield ConnectivityProblem(name, "warn", f"{version}, and {NO_NAMESPACES}", ASK)
    # Pyxis starts enroot where slurmd runs the task. A login node may lack it.
    elif not enroot and "SLURMD_NODENAME" in environ:
        yield ConnectivityProblem(name, "warn", f"srun has {PYXIS_OPTION}, but {version} on this node", ASK)
    else:
        yield _placed(name, f"srun has {PYXIS_OPTION}, {version}", "slurm/train-pyxis.sbatch", environ)


def _placed(name: str, version: str, file: str, environ: Environment) -> ConnectivityProblem:
    """Pass inside a job or without Slurm; on a login node, say how to start a job."""
    if job := environ.get("SLURM_JOB_ID"):
        return ConnectivityProblem(name, "pass", f"{version}, in job {job}")
    if _program("srun", environ) is None:
        return ConnectivityProblem(name, "pass", version)
    remedy = f"submit {file}, or check a node with `srun tandem doctor`"
    return ConnectivityProblem(name, "warn", f"{version}, but this is not inside an allocation", remedy)


def _program(name: str, environ: Environment) -> str | None:
    return shutil.which(name, path=environ.get("PATH", os.defpath))


def _answer(command: list[str], environ: Environment) -> tuple[bool, str]:
    """Run a command; return (success, output), or the last line of its output if it fails."""
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, encoding="utf-8", timeout=TOOL_ANSWER_SECONDS
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    if done.returncode == 0:
        return True, done.stdout.strip()
    lines = (done.stderr or done.stdout).strip().splitlines()
    return False, lines[-1] if lines else f"exit code {done.returncode}"


def _has_namespaces(limit: Path) -> bool:
    """Return False if user namespaces are disabled; a kernel without that limit has them."""
    try:
        return limit.read_text(encoding="ascii").strip() != "0"
    except OSError:
        return True


def _is_setuid(name: str, program: str) -> bool:
    """Return True if the setuid helper is installed next to the program."""
    prefix = Path(program).resolve().parents[1]
    # The directory depends on the distribution: Debian's packages install below lib/<triplet>.
    folders = ("libexec", "lib", f"lib/{platform.machine()}-linux-gnu")
    return any((prefix / folder / name / "bin" / "starter-suid").is_file() for folder in folders)


MIB = 2**20
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


def volume(run_dir: Path, save_bytes: float = 0.0) -> Iterator[ConnectivityProblem]:
    """Check the run's volume: owner, space, and a small file written like a checkpoint.

    A directory that does not exist yet is judged by its nearest existing parent.
    """
    there = nearest_existing(run_dir)
    # Check this first, because access(2) also fails on a read-only mount, where chown does not help.
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
    # Check only the run's directory: a parent such as /tmp is meant to be writable for all.
    if is_run and mode & stat.S_IWOTH:
        return ConnectivityProblem("owner", "warn", f"{who}: anyone can write there", f"`chmod o-w {folder}`")
    return ConnectivityProblem("owner", "pass", who)


def _written(folder: Path) -> ConnectivityProblem:
    """Write a file in the way a checkpoint is committed: write, fsync, rename, fsync of the directory."""
    name = "run volume"
    try:
        # Use the volume itself, because rename(2) works only within one file system.
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
    text = (
        f"{text}, and the longest of {pluralize(len(save_seconds), 'save')} took {format_duration(longest)}"
    )
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
            name, "fail", f"{pluralize(count, 'GPU')}, but {why}", "--device cpu trains without a GPU"
        )
    version: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
    if not dist.is_nccl_available():
        return ConnectivityProblem(
            name, "fail", f"{pluralize(count, 'GPU')}, but no NCCL", "install a torch with NCCL"
        )
    nccl = ".".join(map(str, version()))
    return ConnectivityProblem(
        name, "pass", f"{pluralize(count, 'GPU')}, CUDA {torch.version.cuda}, NCCL {nccl}"
    )


def refused(count: int) -> str:
    """Return why CUDA rejects one of the GPUs that the driver lists; "" if it rejects none."""
    try:
        return why_refused([torch.device("cuda", index) for index in range(count)])
    except RuntimeError as error:  # a new process may fix it
        return first_line(error)


def _number(line: dict[str, object], key: str) -> float:
    value = line.get(key)
    return float(value) if isinstance(value, int | float) else 0.0
