"""What this machine has: its addresses, and its GPUs, divided among the nodes that it simulates.

This module does not import torch, because CUDA_VISIBLE_DEVICES must be set before that import.
"""

import ctypes
import logging
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tandem.config.slices import ComputeConfig
from tandem.errors import ConfigError
from tandem.platforms.environment import LOOPBACK

log = logging.getLogger("tandem.launch")

VISIBLE = "CUDA_VISIBLE_DEVICES"
NVML = "libnvidia-ml.so.1"


def gpus_of(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that torch would see, as CUDA_VISIBLE_DEVICES names them.

    Like CUDA, stops at the first -1.
    """
    if VISIBLE not in environ:
        return [str(index) for index in range(_count())]
    named: list[str] = []
    for name in map(str.strip, environ[VISIBLE].split(",")):
        if not name or name.startswith("-"):
            break
        named.append(name)
    return named


def chosen_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """Return the selected GPUs, in torch's order, or None if all of the machine's GPUs are visible."""
    return gpus_of(environ) if VISIBLE in environ else None


def _count() -> int:
    """Count GPUs with NVML, which also works under WSL2, or else by the device files."""
    try:
        nvml = ctypes.CDLL(NVML)
        count = ctypes.c_uint(0)
        if nvml.nvmlInit_v2() == 0:
            has_counted = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
            nvml.nvmlShutdown()  # nodes are forked from this process and may initialize it again
            if has_counted:
                return count.value
    except (OSError, AttributeError):  # no driver, or a library with other functions
        pass
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def share_of_replica(gpus: Sequence[str], per_node: str | None, node_rank: int, nodes: int) -> dict[str, str]:
    """Return the GPU variables of a Compose replica, for `per_node` GPUs of the host per node.

    Compose gives every replica of a service the same devices, so tandem divides them. "all" gives every node
    all of them. Raises ConfigError if there are not enough.
    """
    if not per_node or per_node == "all":
        return {}
    if not per_node.isdecimal() or not int(per_node):
        raise ConfigError(f"TANDEM_COMPOSE_GPUS: invalid value {per_node!r}; set GPUS to a number, or to all")
    begin = node_rank * int(per_node)
    wanted = int(per_node)
    if len(gpus) < nodes * wanted:
        fits = len(gpus) // wanted
        use = f"NODES={fits}, " if fits else ""
        raise ConfigError(
            f"GPUS={per_node} on {nodes} nodes needs {nodes * wanted} GPUs, but this host has {len(gpus)}; "
            f"set {use}a smaller GPUS, or GPUS=all to give every node all GPUs"
        )
    return {VISIBLE: ",".join(gpus[begin : begin + wanted])}


def gpus_per_node(
    gpus: Sequence[str], nodes: int, nproc: int | None, compute: ComputeConfig
) -> list[dict[str, str]]:
    """Return the GPU variables of each simulated node; empty if there are no GPUs to divide.

    If there are fewer GPUs than ranks, no rank gets a GPU, because all ranks must train on the same kind of
    device. Raises ConfigError if --device asks for GPUs.
    """
    if not gpus or compute.device == "cpu":
        return [{} for _ in range(nodes)]
    per_node = (nproc or 1) * compute.devices_per_rank
    if len(gpus) >= nodes * per_node:
        return [{VISIBLE: ",".join(gpus[index::nodes])} for index in range(nodes)]
    here = f"{nodes} simulated nodes need {nodes * per_node} GPUs, but only {len(gpus)} visible"
    fits = len(gpus) // per_node
    if compute.device == "cuda":
        use = f"--nodes {fits}, or --device cpu" if fits else "fewer ranks, or --device cpu"
        raise ConfigError(f"--device cuda: {here}; use {use}")
    hint = f" (use --nodes {fits} to train on GPUs)" if fits else ""
    log.info("%s; all ranks train on CPUs%s", here, hint)
    return [{VISIBLE: ""} for _ in range(nodes)]


def addresses_of(host: str) -> list[str]:
    """Return the IP addresses of `host`, or an empty list if the name does not resolve."""
    with suppress(OSError, UnicodeError):
        return sorted({str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    return []


def is_local(address: str) -> bool:
    """Return whether this machine has the IP `address`, that is, whether it can bind to it."""
    with socket.socket(family_of(address)) as probe, suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def check_loopback() -> None:
    """Raise ConfigError if the loopback interface is down, as in a new network namespace.

    torch would try to reach the store there for a minute, with a stack trace for each attempt.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((LOOPBACK, 9))  # sends nothing: the kernel only looks for a route
        except OSError as error:
            raise ConfigError(
                f"this machine cannot reach itself at {LOOPBACK} ({error.strerror}), and the processes of a "
                "node connect there; turn on the loopback interface: ip link set lo up (as root)"
            ) from error


def family_of(address: str) -> socket.AddressFamily:
    """Return the address family of an IP address: AF_INET or AF_INET6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
