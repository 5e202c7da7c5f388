"""Read a position set by hand: one node (`--node-rank`, `--master` or NNODES, NODE_RANK), or one rank (RANK).

Ranks set the variables of torch's tutorials: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for
each process, and nothing else. These do not include the number of ranks on this host. It is the world size if
the master is a loopback address; otherwise LOCAL_WORLD_SIZE or NNODES is required. Under a PyTorchJob, which
has PET_* variables, RANK without LOCAL_RANK is a node (kubeflow.py).
"""

from collections.abc import Mapping

from tandem.errors import ConfigError
from tandem.platforms.environment import (
    DEFAULT_PORT,
    LOOPBACK,
    Placement,
    PlatformEnv,
    VariableNames,
    any_set,
    loopback_name,
)

ORDER = 90  # late, because every platform may set MASTER_ADDR, NODE_RANK or RANK
MARKS = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
RANK_MARKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
VARIABLE_NAMES = VariableNames(("NNODES",), ("NODE_RANK",))
RANK_VARIABLE_NAMES = VariableNames(("NNODES",), ("NODE_RANK",), ("LOCAL_WORLD_SIZE",))


def detect(environ: Mapping[str, str]) -> bool:
    return any_set(environ, (*MARKS, *RANK_MARKS))


def unplaced(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that place a node or rank by hand."""
    return {name: value for name, value in environ.items() if name not in (*MARKS, *RANK_MARKS)}


def read(env: PlatformEnv) -> Placement:
    if any_set(env.environ, RANK_MARKS):
        return _rank(env.for_platform("by-hand", RANK_MARKS, RANK_VARIABLE_NAMES))
    return _node(env.for_platform("by-hand", MARKS, VARIABLE_NAMES))


def _node(env: PlatformEnv) -> Placement:
    """Read a node's position from the flags, or NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT.

    A single node needs fewer of them.
    """
    nodes = env.number("nodes")
    alone = nodes == 1
    host = env.text("host") or (LOOPBACK if alone else None)
    if host is None:
        raise env.missing("host")
    node_rank = env.number("node_rank", 0 if alone else None)
    # With a loopback master, all nodes are on this host, so each needs its own address.
    shared = host.startswith("127.") and not alone
    name = loopback_name(node_rank) if shared else host if node_rank == 0 else env.hostname
    return Placement(
        "by-hand",
        nodes,
        node_rank,
        env.nproc(),
        host,
        env.number("port", DEFAULT_PORT),
        local_name=name,
        nodes_share_host=shared,
    )


def _rank(env: PlatformEnv) -> Placement:
    rank = env.variable("RANK")
    world = env.variable("WORLD_SIZE")
    port = env.number("port")
    host = env.host()
    nproc = _ranks_here(env, world, host)
    # `_ranks_here` accepts a missing LOCAL_RANK only if all ranks are on this host.
    local_rank = env.variable("LOCAL_RANK") if env.environ.get("LOCAL_RANK") else rank
    nodes = env.number("nodes", world // nproc)
    node_rank = env.number("node_rank", rank // nproc)
    is_even = nodes * nproc == world and rank == node_rank * nproc + local_rank
    if not is_even or rank >= world or local_rank >= nproc:
        raise ConfigError(
            f"{env.seen()}, which contradicts {nproc} ranks on each of {nodes} nodes; "
            "number ranks from 0, node by node, with the same number of ranks on each"
        )
    name = host if node_rank == 0 else env.hostname
    return Placement("by-hand", nodes, node_rank, nproc, host, port, None, name, rank, local_rank, world)


def _ranks_here(env: PlatformEnv, world: int, host: str) -> int:
    """Return the number of ranks per node, without guessing. Raises ConfigError if it is unknown."""
    is_one_host = world == 1 or host == "localhost" or host.startswith("127.")
    stated = env.nproc()
    if not env.environ.get("LOCAL_RANK") and (stated is not None or not is_one_host):
        raise ConfigError(
            f"{env.seen()} but neither LOCAL_RANK (torchrun sets it) nor PET_NNODES (a PyTorchJob); "
            "start with torchrun, set LOCAL_RANK, or unset RANK and WORLD_SIZE"
        )
    if stated is not None:
        return max(1, stated)
    if env.sources("nodes"):
        return max(1, world // max(1, env.number("nodes")))
    if is_one_host:
        return max(1, world)
    raise ConfigError(
        f"{env.seen()} but the number of ranks on this host is unknown; set LOCAL_WORLD_SIZE or NNODES"
    )
