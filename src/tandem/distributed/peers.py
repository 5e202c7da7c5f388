"""Is another rank gone? Read from torch's typed errors and from gloo's and NCCL's own messages alone.

gloo, and NCCL before torch 2.2, throw bare RuntimeErrors: only their text tells them from a task's error.
Both libraries begin it in ways of their own, so each pattern holds at the beginning; a word such as "store"
or "timed out" further on says nothing. tests/multi/test_peer_loss.py provokes real ones of this torch.
"""

import re

import torch.distributed as dist

LOST_PEER_MESSAGES = {
    # gloo says where it threw: "[/__w/.../gloo/transport/tcp/pair.cc:561] Connection closed by peer",
    # "[.../unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation". torch 2.11 to 2.15.
    "gloo": re.compile(r"\[\S*/gloo/\S+\.(cc|h):\d+\] "),
    # "Gloo connectFullMesh failed with [.../pair.cc:161] ..." while a group opens. torch 2.11 to 2.15.
    "gloo opens": re.compile(r"Gloo connectFullMesh failed with "),
    # c10d's Work::wait, when a collective's own time limit is over. torch 2.11 to 2.15 (Work.cpp).
    "c10d": re.compile(r"Operation timed out!"),
    # ProcessGroupNCCL.cpp, NCCLUtils.hpp. Typed since 2.2; kept for what is handed on as text.
    "NCCL": re.compile(
        r"NCCL (error in: |communicator (was aborted|encountered error)|Error \d+: )"
        r"|\[(PG [^\]]*)?Rank \d+\] .*(Watchdog caught collective operation timeout|NCCL watchdog)"
    ),
}
CALLBACK = re.compile(r"(Got the following error when running the callback: (\w+: )?)+")
"""What torch's futures put before an error that a hook of DDP has passed on. torch 2.11 to 2.15."""


def is_peer_loss(error: BaseException, world_size: int) -> bool:
    """Whether `error` says that another rank, or the store through which ranks meet, is gone.

    Everything else is an error of the task, and so is everything in a world of one: nobody can be lost there.
    """
    if world_size == 1:
        return False
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
        return True
    text = CALLBACK.sub("", str(error), count=1) if CALLBACK.match(str(error)) else str(error)
    return isinstance(error, RuntimeError) and any(p.match(text) for p in LOST_PEER_MESSAGES.values())
