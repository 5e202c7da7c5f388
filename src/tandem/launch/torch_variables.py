"""Set variables that torch and its libraries read when they are imported or connect.

The fork server passes its environment on to the ranks. Values that the user has set win.
"""

import os


def set_for_ranks(is_one_host: bool, has_own_store: bool) -> None:
    """Set everything that ranks under an agent need, before anything imports torch."""
    if is_one_host:
        use_loopback()
    wait_passively()
    # torch records the last collectives of each rank, for the report of a hang.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "200")
    # The NCCL group that was torch's default until 2.14. With the default of 2.15, backward waits for each
    # bucket's all-reduce: communication does not overlap with computation, and a rank that waits seems to
    # compute. Ranks without an agent do the same when they open their group (distributed/group.py).
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
    # Number GPUs by PCI slot, as NVML and nvidia-smi do. CUDA's default order is fastest first. On a machine
    # with several kinds of GPU, metrics would show another GPU's numbers.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if not has_own_store:  # a script's store; its dumps are its own concern
        # By default, torch writes a signal and a dump of NCCL errors to the agents' store, where later
        # generations would read them. A rank that hangs writes its record anyway. With no dump to wait for
        # (15 s in torch's newer group), the process aborts at once.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0")


def use_loopback() -> None:
    """Make gloo and NCCL use the loopback device, because all ranks are on this host.

    No other host can connect then, and the host's own name need not resolve.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")


def wait_passively() -> None:
    """Let OpenMP threads sleep while they wait; spinning would take cores from threads that compute.

    On a busy machine, that is the difference between a fair share of the throughput and a sixtieth of it.
    OpenMP reads it when torch is imported. A value that the user has set wins, GOMP_SPINCOUNT included.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
