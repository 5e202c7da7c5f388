"""The number of CPU threads of a rank: its share of the host's cores, or its container's limit."""

import os
import re
from collections.abc import Mapping

from tandem.cluster.engine import ClusterError, dotenv

LIMITS = ("CPUS", "MEMORY", "SHM_SIZE", "TMP_SIZE")
OURS = "THREADS_ARE_A_SHARE"
"""A cluster variable that says that TANDEM_THREADS was not set, so `compose-scale` computes it again."""


def limits_given() -> dict[str, str]:
    """Return the limits of each node from the caller's environment; Compose itself reads those in .env.

    Raises ClusterError for a size of /tmp that the kernel would reject: tmpfs(5) does not accept `gb`.
    """
    found = {name: os.environ[name] for name in LIMITS if os.environ.get(name)}
    if "TMP_SIZE" in found:
        size = found["TMP_SIZE"].lower().removesuffix("b")
        if not re.fullmatch(r"[1-9][0-9]*[kmg]?", size):
            raise ClusterError(f"TMP_SIZE={found['TMP_SIZE']} is not a size; expected 512m, 2g...")
        found["TMP_SIZE"] = size
    return found


def share_of(nodes: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Return TANDEM_THREADS for a cluster of `nodes` nodes on this host. Raises ClusterError."""
    cpus = checked_cpus(variables.get("CPUS") or dotenv().get("CPUS", ""))
    return {"TANDEM_THREADS": threads_of(os.cpu_count() or 1, nodes, cpus, variables["GPUS"]), OURS: "1"}


def threads_of(cores: int, nodes: int, cpus: float, gpus: str) -> str:
    """Return the threads of a rank; `auto` if the container's limit is at most the node's share.

    With `auto`, tandem reads that limit. Without such a limit, a container sees all cores of the host, which
    its nodes must share.
    """
    if 0 < cpus <= cores / nodes:
        return "auto"
    ranks = int(gpus) if gpus.isdigit() else 1  # one rank per GPU
    # A host can have fewer cores than ranks.
    return str(max(1, cores // nodes // ranks))


def checked_cpus(text: str) -> float:
    """Return the cores that a node may use, 0 for all. Raises ClusterError."""
    if not re.fullmatch(r"([0-9]{1,4}(\.[0-9]*)?)?", text):
        raise ClusterError(
            f"CPUS: invalid value {text!r}; expected a number of cores per node such as 0.5, 1 or 2: "
            "make compose-up CPUS=2"
        )
    return float(text or 0)
