"""Read the position from Azure Machine Learning's variables (distribution PyTorch).

"Azure ML will set the MASTER_ADDR, MASTER_PORT, WORLD_SIZE, and NODE_RANK environment variables on each node,
and set the process-level RANK and LOCAL_RANK" (Microsoft's "Distributed GPU training guide"). With one
process per instance, that process is the node's agent, like a Slurm task; with several, each is a rank. Every
job has AZUREML_RUN_ID, and AZUREML_NODE_COUNT is the number of instances.
"""

from collections.abc import Mapping
from dataclasses import replace

from tandem.errors import ConfigError
from tandem.platforms.environment import (
    DEFAULT_PORT,
    LOOPBACK,
    Placement,
    PlatformEnv,
    VariableNames,
    any_set,
    assignments,
)

ORDER = 45  # before by-hand, because it sets RANK and MASTER_ADDR; its distribution MPI is Open MPI's mpirun
MARKS = ("AZUREML_NODE_COUNT", "AZUREML_RUN_ID")
VARIABLE_NAMES = VariableNames(nodes=("AZUREML_NODE_COUNT",), node_rank=("NODE_RANK",))


def detect(environ: Mapping[str, str]) -> bool:
    return any_set(environ, MARKS)


def read(env: PlatformEnv) -> Placement:
    env = env.for_platform("azureml", MARKS, VARIABLE_NAMES)
    is_placed = any_set(env.environ, ("NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR"))
    # A job without a distribution has one instance, and none of these variables.
    nodes = env.number("nodes", None if is_placed else 1)
    if nodes > 1 and not is_placed and not env.flags.keys() >= {"node_rank", "host"}:
        raise ConfigError(
            f"{env.seen()} but NODE_RANK and MASTER_ADDR are not; give the job a distribution: "
            "type pytorch, process_count_per_instance 1"
        )
    host = env.text("host") or (LOOPBACK if nodes == 1 else env.host())
    node_rank = env.number("node_rank", 0 if nodes == 1 else None)
    placement = Placement(
        "azureml",
        nodes,
        node_rank,
        env.nproc(),
        host,
        env.number("port", DEFAULT_PORT),
        local_name=host if node_rank == 0 else env.hostname,
    )
    # WORLD_SIZE counts processes. If it equals the number of instances, each has one process, the node's
    # agent.
    world = env.variable("WORLD_SIZE") if env.environ.get("WORLD_SIZE") else nodes
    return placement if world == nodes else _rank(env, placement, world)


def _rank(env: PlatformEnv, placement: Placement, world: int) -> Placement:
    """Return the placement of one of several processes per instance."""
    rank = env.variable("RANK")
    local_rank = env.variable("LOCAL_RANK")
    here = world // max(1, placement.nodes)
    is_even = here * placement.nodes == world and rank == placement.node_rank * here + local_rank
    if not is_even or local_rank >= here or placement.nproc not in (None, here):
        names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "AZUREML_NODE_COUNT")
        raise ConfigError(
            f"{assignments({name: env.environ.get(name, '') for name in names})} contradict each other; "
            "give the job one process per instance (process_count_per_instance 1); do not set these by hand"
        )
    return replace(placement, nproc=here, rank=rank, local_rank=local_rank, world_size=world)
