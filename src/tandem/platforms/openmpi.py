"""Read the position of a rank started by Open MPI's `mpirun`."""

from collections.abc import Mapping

from tandem.errors import ConfigError
from tandem.platforms.environment import (
    DEFAULT_PORT,
    LOOPBACK,
    Placement,
    PlatformEnv,
    VariableNames,
    any_set,
)

ORDER = 20  # before Slurm and the clouds, which mpirun uses to start its ranks
MARKS = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
VARIABLE_NAMES = VariableNames(nproc=("OMPI_COMM_WORLD_LOCAL_SIZE",))


def detect(environ: Mapping[str, str]) -> bool:
    return any_set(environ, MARKS)


def read(env: PlatformEnv) -> Placement:
    """Read the position.

    `mpirun` sets no address and no node rank, so ranks must be laid out node by node, evenly.
    """
    env = env.for_platform("openmpi", MARKS, VARIABLE_NAMES)
    prefix = "OMPI_COMM_WORLD_"
    rank, world, local_rank, nproc = (
        env.variable(prefix + name) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    # Read this only to reject a --nproc that contradicts OMPI_COMM_WORLD_LOCAL_SIZE.
    env.nproc()
    if nproc < 1 or rank >= world or world % nproc or rank % nproc != local_rank:
        raise ConfigError(
            f"OMPI_COMM_WORLD_RANK={rank} of SIZE={world} with LOCAL_RANK={local_rank} of LOCAL_SIZE={nproc} "
            "is not an even layout; start with mpirun --map-by slot and the same number on each node"
        )
    nodes = env.number("nodes", world // nproc)
    if nodes != world // nproc:
        raise ConfigError(
            f"--nodes={nodes} contradicts OMPI_COMM_WORLD_SIZE={world} / LOCAL_SIZE={nproc}; omit --nodes"
        )
    host = env.text("host") or (LOOPBACK if nodes == 1 else None)
    if host is None:
        raise ConfigError(
            f"OMPI_COMM_WORLD_SIZE={world} is set but MASTER_ADDR is not; start with "
            "mpirun -x MASTER_ADDR=FIRST_NODE -x MASTER_PORT=29500"
        )
    return Placement(
        "openmpi",
        nodes,
        env.number("node_rank", rank // nproc),
        nproc,
        host,
        env.number("port", DEFAULT_PORT),
        local_name=env.hostname,
        rank=rank,
        local_rank=local_rank,
        world_size=world,
    )
