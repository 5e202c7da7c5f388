"""Variables that torch and the libraries below it read when they are imported or connect, set before they do.

The fork server hands its environment on to the ranks. What a person has set counts.
"""

import os


def set_for_ranks(is_one_host: bool, is_script: bool) -> None:
    """All that ranks under an agent need, before anything imports torch."""
    if is_one_host:
        use_loopback()
    record_collectives()
    wait_passively()
    use_older_nccl()
    number_gpus_by_slot()
    if not is_script:  # its ranks meet in a store of their own, and its dumps are its own affair
        keep_nccl_errors_here()


def use_loopback() -> None:
    """Make gloo and NCCL talk over the loopback device: all ranks are on this host, and nobody else is heard.

    Nor need the host's own name resolve.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")


def record_collectives() -> None:
    """Let torch remember the last collectives of each rank, for the report of a hang."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "200")


def keep_nccl_errors_here() -> None:
    """A NCCL error ends its own generation: no signal in the agents' store, which later ones use, too.

    Signal and dump are what torch does by itself; a rank that is stuck writes its record anyway. Nor is there
    anything to wait for (torch's newer group: 15 s) before the process is aborted.
    """
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0")


def use_older_nccl() -> None:
    """Open "nccl" as torch did until 2.14. The group that is the default in 2.15 makes backward wait for each
    bucket's all-reduce: nothing is exchanged while it computes, and a rank that waits seems to compute.

    Ranks without an agent do the same when they open their group (distributed/group.py).
    """
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")


def number_gpus_by_slot() -> None:
    """Number GPUs as NVML and nvidia-smi do, by PCI slot. CUDA's own order is the fastest first: where a
    machine has several kinds, metrics would show another GPU's numbers.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def wait_passively() -> None:
    """Let threads of OpenMP sleep while they wait: spinning, they take the cores that others compute on.

    On a busy machine that is the difference between a share of the pace and a sixtieth of it. It is read
    when torch is imported, so it comes before; a value of one's own (GOMP_SPINCOUNT as well) counts.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
