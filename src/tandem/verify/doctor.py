"""`tandem doctor`: report what this machine or container provides for a run, and any problems.

It changes nothing, except that it writes and removes one small file on the run's volume.
"""

import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from tandem import __version__
from tandem.config import Settings
from tandem.data.block_cache import CacheContents, contents
from tandem.data.tar_shards import CACHE_BYTES, default_folder
from tandem.distributed.devices import DRIVER_FILE, driver_version, why_no_gpu
from tandem.errors import TandemError
from tandem.launch.connectivity import ConnectivityProblem, clock, interfaces, names, others, world_size
from tandem.platforms.detection import detect_here
from tandem.process import nearest_existing
from tandem.run.directory import RunDir
from tandem.verify import machine
from tandem.verify.machine import findings, refused

GIB = 2**30
# Control groups version 2, then version 1. Without a limit, the value is "max" or a number near 2**63.
MEMORY_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
NO_LIMIT_BYTES = 2**60
NO_DRIVER = "none: no NVIDIA driver here (a container needs --gpus all and NVIDIA's container toolkit)"

Environment = Mapping[str, str]


class Diagnosis(NamedTuple):
    """`facts` by name, and `findings` of the checks; each is pass, warn or fail."""

    facts: dict[str, str]
    findings: list[ConnectivityProblem]

    @property
    def state(self) -> str:
        return max((each.state for each in self.findings), key=("pass", "warn", "fail").index)

    def as_text(self) -> str:
        """Format one line per fact and finding, with a remedy below each problem."""
        lines = [f"{name:<10} {value}" for name, value in self.facts.items()] + [""]
        for each in self.findings:
            lines.append(f"{each.state}  {each.name:<12} {each.text}")
            lines += [f"{'':<19}{each.remedy}"] if each.state != "pass" else []
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        """{"state", "facts": {name: text}, "checks": [{"name", "state", "said", "remedy"}]}."""
        checks = [
            {"name": each.name, "state": each.state, "said": each.text, "remedy": each.remedy}
            for each in self.findings
        ]
        return {"state": self.state, "facts": self.facts, "checks": checks}


def diagnose(settings: Settings, environ: Environment) -> Diagnosis:
    """Return all facts and checks; the line of a fact that cannot be determined says why."""
    facts = dict(_lines(settings, environ))
    checks = [*_position_checks(settings, environ), *findings(settings), *machine.container_findings(environ)]
    checks += cache_findings(default_folder())
    return Diagnosis(facts, checks)


def _position_checks(settings: Settings, environ: Environment) -> Iterator[ConnectivityProblem]:
    """Check this node's position, and whether it can reach the others."""
    nproc = settings.launch.nproc
    ranks = max(1, torch.cuda.device_count()) if nproc == "auto" else int(nproc)
    try:
        placement = detect_here(environ, settings.launch)
    except (TandemError, OSError) as error:
        remedy = "see docs/platforms.md for the variables of each platform"
        yield world_size(environ, None, ranks) or ConnectivityProblem("placement", "fail", str(error), remedy)
        yield from interfaces(environ)
        yield clock({})
        return
    yield ConnectivityProblem("placement", "pass", str(placement))
    if (counts := world_size(environ, placement, ranks)) is not None:
        yield counts
    yield from names(placement, environ)
    yield from interfaces(environ)
    yield from others(placement)


def _lines(settings: Settings, environ: Environment) -> Iterator[tuple[str, str]]:
    run_dir = settings.run.run_dir
    yield "tandem", f"{__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield from _torch()
    # A container's or job's cpuset limits the affinity, but not os.cpu_count().
    yield "cores", f"{len(os.sched_getaffinity(0))} for this process, {os.cpu_count()} in the machine"
    yield "memory", memory(Path("/"))
    yield "/dev/shm", _space(Path("/dev/shm"))
    yield "run dir", _space(RunDir(run_dir).folder) if run_dir else "runs/TASK-TIME, created at the start"
    yield "data", _space(settings.data.data_dir)
    yield "blocks", _tried(lambda: _blocks(default_folder()))
    yield ("placement", _tried(lambda: str(detect_here(environ, settings.launch))))


def _torch() -> Iterator[tuple[str, str]]:
    yield "torch", f"{torch.__version__}, {'CPU build' if torch.version.cuda is None else 'CUDA build'}"
    yield "CUDA", torch.version.cuda or "none in this build of torch"
    # torch has no annotations for these two functions.
    cudnn: Callable[[], int | None] = torch.backends.cudnn.version
    nccl: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
    yield "cuDNN", dotted(cudnn()) or "none in this build of torch"
    yield "NCCL", ".".join(map(str, nccl())) if dist.is_nccl_available() else "none in this build of torch"
    yield "gloo", "available" if dist.is_gloo_available() else "missing, but training on CPUs needs it"
    yield "driver", driver_version() or NO_DRIVER
    count = torch.cuda.device_count()
    why = refused(count) if count else why_no_gpu(DRIVER_FILE)
    if count and not why:
        yield "GPUs", ", ".join(torch.cuda.get_device_name(i) for i in range(count))
    else:
        yield "GPUs", f"none that torch {'can use' if count else 'sees'}{': ' if why else ''}{why}"


def dotted(number: int | None) -> str:
    """Format cuDNN's version: 92600 -> 9.26.0 (from version 9 on, two digits each)."""
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}" if number else ""


def memory(root: Path) -> str:
    """Return the memory in GiB, and a container's lower limit; `root` contains proc and sys."""
    lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    text = f"{kib['MemTotal'] * 1024 / GIB:.1f} GiB, {kib['MemAvailable'] * 1024 / GIB:.1f} available"
    for name in MEMORY_LIMITS:
        if (root / name).is_file():
            # A limit above the machine's memory limits nothing.
            limit = (root / name).read_text(encoding="utf-8").strip()
            if limit.isdigit() and int(limit) < min(NO_LIMIT_BYTES, kib["MemTotal"] * 1024):
                text += f", limited to {int(limit) / GIB:.1f}"
            break
    return text


def _space(folder: Path) -> str:
    """Return the free space of the nearest existing directory, and whether it is writable."""
    there = nearest_existing(folder)
    usage = shutil.disk_usage(there)
    may = "writable" if os.access(there, os.W_OK) else f"NOT writable for user {os.getuid()}"
    return f"{folder}: {may}, {usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"


def _blocks(folder: Path) -> str:
    """Return what the block cache of this user contains, if it is where `tar_blocks` puts it by default."""
    if not folder.is_dir():
        return f"{_space(folder)}, no block cache"
    cache = contents(folder)
    return f"{_space(folder)}, {cache.blocks} blocks with {_of_limit(cache)}"


def _of_limit(cache: CacheContents) -> str:
    return f"{cache.size / GIB:.1f} of at most {(cache.limit or CACHE_BYTES) / GIB:.1f} GiB"


def cache_findings(folder: Path) -> Iterator[ConnectivityProblem]:
    """Check that the block cache in a folder, if there is one, can be used and has room to grow."""
    name = "block cache"
    remedy = "use another cache_dir in tar_blocks()"
    try:
        if not folder.is_dir():
            return
        cache = contents(folder)
        free = shutil.disk_usage(folder).free
        owner = folder.stat().st_uid
    except OSError as error:
        yield ConnectivityProblem(name, "warn", f"{folder}: {error.strerror or error}", remedy)
        return
    text = f"{folder}: {_of_limit(cache)} used, {free / GIB:.1f} GiB free"
    missing = (cache.limit or CACHE_BYTES) - cache.size - free
    if owner != os.getuid():
        text = f"{folder} belongs to user {owner}; this process runs as user {os.getuid()}"
        yield ConnectivityProblem(name, "warn", text, remedy)
    elif missing > 0:
        # A block that finds no room on the disk ends the run.
        remedy = f"free {missing / GIB:.1f} GiB, set a lower cache_bytes, or {remedy}"
        yield ConnectivityProblem(name, "warn", text, remedy)
    else:
        yield ConnectivityProblem(name, "pass", text)


def _tried(check: Callable[[], str]) -> str:
    try:
        return check()
    except (TandemError, OSError) as error:
        return f"unknown: {error}"
