"""Bind a rank to the CPUs close to its GPU: on a NUMA host, memory of other nodes is slower."""

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

log = logging.getLogger("tandem.run")


def bind_to_node(devices: Iterable[torch.device], root: Path = Path("/")) -> None:
    """Let all threads of this process run only on the CPUs of its GPUs' NUMA nodes.

    The CPUs are from the kernel's list (`/sys/bus/pci/devices/ADDRESS/local_cpulist`), limited to those that
    the process may use now. Without a GPU or a list, a warning says that nothing was done.
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
    # sched_setaffinity() binds a single thread. Later threads inherit that, but torch and CUDA have started
    # some already.
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
