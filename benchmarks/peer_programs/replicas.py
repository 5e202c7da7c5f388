"""torchft in the shape of its own example (train_ddp.py): one replica group of one process for each rank.

As there, a restarted group reads its shard of the data from the beginning: the example leaves the checkpoint
of the data loader to its user.
"""

import os
from datetime import timedelta
from typing import Any

import workload
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing.pg_transport import PGTransport
from torchft.data import DistributedSampler


def main() -> None:
    group = int(os.environ["REPLICA_GROUP_ID"])
    sampler = DistributedSampler(
        range(workload.SAMPLES),  # type: ignore[arg-type]
        replica_rank=group,
        num_replica_groups=workload.RANKS,
        group_rank=0,
        num_replicas=1,
        shuffle=True,
    )
    model = workload.build_model()
    processes = ProcessGroupGloo(timeout=timedelta(seconds=5))

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    manager = Manager(
        pg=processes,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"train_ddp_{group}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(processes, timedelta(seconds=10), device="cpu"),
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, workload.build_optimizer(model))
    data, samples, record = workload.rows(), list(sampler), workload.Record()
    position = 0
    while True:
        used = samples[position : position + workload.SHARE]
        before = manager.current_step()
        workload.train_step(wrapped, optimizer, data, used)
        position += workload.SHARE
        # A healing group takes part with zeros: its samples are not in the step that is committed.
        counted = manager.current_step() > before and manager.is_participating()
        record.step(manager.current_step(), group, manager.num_participants(), used, counted)


if __name__ == "__main__":
    main()
