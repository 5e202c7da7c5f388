"""How many CPU threads a rank counts on: its share of the host's cores, or of its container's limit."""

import os
import re
from collections.abc import Mapping

from tandem.cluster.engine import ClusterError, dotenv

LIMITS = ("CPUS", "MEMORY", "SHM_SIZE", "TMP_SIZE")
OURS = "THREADS_ARE_A_SHARE"
"""Among a cluster's variables: nobody has given TANDEM_THREADS, and `compose-scale` counts anew."""


def limits_given() -> dict[str, str]:
    """The limits of each node that the caller's environment has; Compose itself reads those of .env.

    Raises ClusterError for a size of /tmp that the kernel would refuse, which knows no `gb` (tmpfs(5)).
    """
    found = {name: os.environ[name] for name in LIMITS if os.environ.get(name)}
    if "TMP_SIZE" in found:
        size = found["TMP_SIZE"].lower().removesuffix("b")
        if not re.fullmatch(r"[1-9][0-9]*[kmg]?", size):
            raise ClusterError(f"TMP_SIZE={found['TMP_SIZE']} is not a size; expected 512m, 2g...")
        found["TMP_SIZE"] = size
    return found


def share_of(nodes: int, variables: Mapping[str, str]) -> dict[str, str]:
    """TANDEM_THREADS for a cluster of that many nodes on this host. Raises ClusterError."""
    cpus = checked_cpus(variables.get("CPUS") or dotenv().get("CPUS", ""))
    return {"TANDEM_THREADS": threads_of(os.cpu_count() or 1, nodes, cpus, variables["GPUS"]), OURS: "1"}


def threads_of(cores: int, nodes: int, cpus: float, gpus: str) -> str:
    """Threads of a rank. `auto` where the container's limit is no more than the node's share: it reads that.

    Without such a limit a container sees all cores of the host, which its nodes have to share.
    """
    if 0 < cpus <= cores / nodes:
        return "auto"
    ranks = int(gpus) if gpus.isdigit() else 1  # a rank for each GPU
    return str(max(1, cores // nodes // ranks))


def checked_cpus(text: str) -> float:
    """Cores that a node may use, 0 for all. Raises ClusterError."""
    if not re.fullmatch(r"([0-9]{1,4}(\.[0-9]*)?)?", text):
        raise ClusterError(
            f"CPUS: invalid value {text!r}; expected a number of cores per node such as 0.5, 1 or 2: "
            "make compose-up CPUS=2"
        )
    return float(text or 0)
