"""plain.py with the in-process restart of nvidia-resiliency-ext, in the shape of its advanced example.

    python in_process.py --ranks 3

starts that many processes. RANKS of them train, and the others are in reserve. No launcher may end the other
processes when one is killed, so torchrun does not fit (its usage guide, "Known issues").

The process that starts them hosts the store of the wrapper, through `store_factory`. By default, rank 0 hosts
it, and a kill of rank 0 ends the job (its usage guide, "Restrictions").
"""

import os
import socket
import subprocess
import sys
from datetime import timedelta

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "error")
TIMEOUT = timedelta(seconds=10)
"""Of gloo, as in the example."""
SHORT = timedelta(seconds=0.1)


def start(ranks: int) -> int:
    """Start the ranks, wait for all, and return the largest exit code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    each = [
        subprocess.Popen([sys.executable, __file__], env={**os.environ, **place, "RANK": str(rank)})
        for rank in range(ranks)
    ]
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port + 1, is_master=True, wait_for_workers=False)
    code = max(process.wait() for process in each)
    del store  # which has lived as long as the ranks
    return code


def main() -> None:
    """One rank. `train` is called again in the surviving processes after each failure."""
    import nvidia_resiliency_ext.inprocess as inprocess
    import torch.distributed as dist
    import workload
    from torch.nn.parallel import DistributedDataParallel

    model = workload.build_model()
    optimizer = workload.build_optimizer(model)
    port = int(os.environ["MASTER_PORT"])

    def train(call_wrapper: inprocess.CallWrapper | None = None) -> None:
        assert call_wrapper is not None
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        place = ("127.0.0.1", port + 2 + call_wrapper.iteration)
        store = dist.TCPStore(*place, ranks, rank == 0, multi_tenant=True)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
        done = workload.load(workload.saved(), model, optimizer)
        for step in workload.steps(DistributedDataParallel(model), optimizer, done):
            if rank == 0 and step % workload.SAVE_EVERY == 0:
                with call_wrapper.atomic():
                    workload.save(workload.state_of(model, optimizer, step))

    class HostedElsewhere(inprocess.store.TCPStore):
        TCP_STORE_HOST_RANK = -1

    inprocess.Wrapper(
        store_factory=HostedElsewhere,
        store_kwargs={"port": port + 1},
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.MaxActiveWorldSize(workload.RANKS),
            inprocess.rank_assignment.ShiftRanks(),
        ),
        monitor_thread_interval=SHORT,
        monitor_process_interval=SHORT,
        heartbeat_interval=SHORT,
        progress_watchdog_interval=SHORT,
        last_call_wait=SHORT,
    )(train)()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ranks"]:
        sys.exit(start(int(sys.argv[2])))
    main()
