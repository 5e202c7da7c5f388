"""Set a rank's environment: the variables that torchrun's workers get, and tandem's settings."""

import os
from collections.abc import Mapping
from pathlib import Path

from tandem.distributed.position import Position
from tandem.script.job import Job

RUN_ID = "tandem"


def error_file(position: Position) -> Path:
    """Return the path where torch's `@record`, and tandem's runner, record the error that ended the rank."""
    folder = Path(position.sample_socket or ".").parent
    return folder / f"attempt-{position.restart}" / f"rank-{position.rank}" / "error.json"


def variables(job: Job, position: Position, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the rank at `position`, on top of the node's environment `given`.

    Names and rules are those of torch 2.15's agent; tests/scripts/test_environment.py compares them with a
    real torchrun. MASTER_ADDR and MASTER_PORT are a store that the agent hosts for this generation alone.
    """
    host, port = position.master or ("127.0.0.1", 0)
    found = {
        "RANK": position.rank,
        "LOCAL_RANK": position.local_rank,
        "GROUP_RANK": position.node_rank,
        "ROLE_RANK": position.rank,
        "ROLE_NAME": "default",
        "WORLD_SIZE": position.world_size,
        "LOCAL_WORLD_SIZE": position.local_world_size,
        "GROUP_WORLD_SIZE": position.nodes,
        "ROLE_WORLD_SIZE": position.world_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": position.restart,
        "TORCHELASTIC_MAX_RESTARTS": job.max_restarts,
        "TORCHELASTIC_RUN_ID": RUN_ID,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_ERROR_FILE": error_file(position),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": given.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
    }
    # As torchrun does, which counts ranks on its node.
    if position.ranks_on_host > 1 and "OMP_NUM_THREADS" not in given:
        found["OMP_NUM_THREADS"] = 1
    return {name: str(value) for name, value in found.items()} | dict(job.variables)


def set_variables(job: Job, position: Position) -> None:
    """Set the rank's variables in this process."""
    os.environ.update(variables(job, position, os.environ))
