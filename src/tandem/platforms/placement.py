"""Where this node stands: environment -> `Placement`, by the platform that it is on.

What is missing or contradicts is a `ConfigError` that names the variables; a cluster never becomes a silent
world of one. Pure: nothing is resolved, opened or imported here.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from tandem.errors import ConfigError
from tandem.platforms.environment import (
    COLUMNS,
    DEFAULT_PORT,
    LOOPBACK,
    MARKS,
    Columns,
    Facts,
    Placement,
    alone,
    loopback_name,
    said,
    split_address,
    value_range,
)
from tandem.platforms.kubernetes import indexed_job, jobset, kubeflow
from tandem.platforms.slurm import in_step, slurm

__all__ = ["Placement", "detect"]


def detect(
    environ: Mapping[str, str],
    hostname: str,
    *,
    nodes: int | None = None,
    node_rank: int | None = None,
    master: str | None = None,
    nproc: int | str | None = None,
    elastic: str | tuple[int, int] | None = None,
) -> Placement:
    """This node's placement from the environment, the host's name and the flags given (None = not given).

    Raises ConfigError, one line, naming the variables that are missing, malformed or contradict each other.
    """
    platform = next(
        (name for name, marks in MARKS.items() if any(environ.get(mark) for mark in marks)), "none"
    )
    by_hand = node_rank is not None or master is not None
    if by_hand and (
        platform == "none" or (platform == "slurm" and not in_step(environ) and node_rank is not None)
    ):
        platform = "by-hand"
    flags = {"nodes": nodes, "node_rank": node_rank, "nproc": None if nproc == "auto" else nproc}
    given = {name: str(value) for name, value in flags.items() if value is not None}
    if master is not None:
        given["host"], given["port"] = split_address("--master", master)
    bounds = value_range("--elastic", elastic) if isinstance(elastic, str) else elastic
    facts = Facts(
        environ, hostname, platform, COLUMNS.get(platform, Columns((), (), (), (), ())), given, bounds
    )
    return _checked(READERS[platform](facts), facts)


def _checked(placement: Placement, facts: Facts) -> Placement:
    """Bounds that hold on every platform."""
    given = said({**facts.sources("nodes"), **facts.sources("node_rank")}) or str(placement)
    if placement.nodes < 1 or placement.node_rank >= placement.nodes:
        raise ConfigError(
            f"node {placement.node_rank} of {placement.nodes} cannot be ({given}, host {facts.hostname}); "
            f"{placement.platform} counts nodes from 0 to nodes - 1"
        )
    if placement.master_port > 65535:
        raise ConfigError(
            f"master port {placement.master_port} is not valid ({said(facts.sources('port'))}); "
            "give 1 to 65535"
        )
    if facts.elastic is None:
        return placement
    if placement.rank is not None:
        raise ConfigError(
            f"--elastic does not go with ranks that {placement.platform} starts itself; "
            "start one task per node"
        )
    stated = placement.elastic or facts.elastic
    if stated != facts.elastic or not facts.elastic[0] <= placement.nodes <= facts.elastic[1]:
        raise ConfigError(
            f"--elastic {facts.elastic[0]}:{facts.elastic[1]} contradicts {given}; make them the same range"
        )
    return replace(placement, elastic=facts.elastic)


def _torchrun(facts: Facts) -> Placement:
    rank, local_rank, world = (facts.variable(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    nproc = facts.variable("LOCAL_WORLD_SIZE")
    facts.nproc()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if nproc < 1 or rank >= world or local_rank >= nproc or nproc > world:
        raise ConfigError(
            f"{said({name: facts.environ[name] for name in names})} contradict each other; "
            "start with torchrun, and set none of them by hand"
        )
    return Placement(
        "torchrun",
        facts.number("nodes", world // nproc),
        facts.number("node_rank", rank // nproc),
        nproc,
        facts.host(),
        facts.number("port"),
        local_name=facts.hostname,
        rank=rank,
        local_rank=local_rank,
        world_size=world,
    )


def _openmpi(facts: Facts) -> Placement:
    """`mpirun` gives no address and no node rank: ranks must be laid out node by node, evenly."""
    prefix = "OMPI_COMM_WORLD_"
    rank, world, local_rank, nproc = (
        facts.variable(prefix + name) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    facts.nproc()
    if nproc < 1 or rank >= world or world % nproc or rank % nproc != local_rank:
        raise ConfigError(
            f"OMPI_COMM_WORLD_RANK={rank} of SIZE={world} with LOCAL_RANK={local_rank} of LOCAL_SIZE={nproc} "
            "is no even layout node by node; start with mpirun --map-by slot and the same number on each node"
        )
    nodes = facts.number("nodes", world // nproc)
    if nodes != world // nproc:
        raise ConfigError(
            f"--nodes={nodes} contradicts OMPI_COMM_WORLD_SIZE={world} / LOCAL_SIZE={nproc}; "
            "leave --nodes out"
        )
    host = facts.text("host") or (LOOPBACK if nodes == 1 else None)
    if host is None:
        raise ConfigError(
            f"OMPI_COMM_WORLD_SIZE={world} is set but MASTER_ADDR is not; start with "
            "mpirun -x MASTER_ADDR=FIRST_NODE -x MASTER_PORT=29500"
        )
    return Placement(
        "openmpi",
        nodes,
        facts.number("node_rank", rank // nproc),
        nproc,
        host,
        facts.number("port", DEFAULT_PORT),
        local_name=facts.hostname,
        rank=rank,
        local_rank=local_rank,
        world_size=world,
    )


def _compose(facts: Facts) -> Placement:
    """Replicas are named <project>-node-<index>, counted from 1."""
    project, index = facts.environ.get("TANDEM_COMPOSE_PROJECT"), facts.variable("TANDEM_COMPOSE_INDEX")
    if not project:
        raise ConfigError(
            "TANDEM_COMPOSE_INDEX is set but TANDEM_COMPOSE_PROJECT is not; start with docker compose up"
        )
    nodes = facts.number("nodes")
    if not 1 <= index <= nodes:
        raise ConfigError(
            f"TANDEM_COMPOSE_INDEX={index} is not 1 to TANDEM_COMPOSE_NODES={nodes}; "
            "indices have a gap: docker compose down, then up again"
        )
    return Placement(
        "compose",
        nodes,
        facts.number("node_rank", index - 1),
        facts.nproc(),
        facts.text("host") or f"{project}-node-1",
        facts.number("port", DEFAULT_PORT),
        local_name=f"{project}-node-{index}",
    )


def _by_hand(facts: Facts) -> Placement:
    """From the flags, or NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT; one node needs fewer."""
    nodes = facts.number("nodes")
    alone = nodes == 1
    host = facts.text("host") or (LOOPBACK if alone else None)
    if host is None:
        raise facts.missing("host")
    node_rank = facts.number("node_rank", 0 if alone else None)
    shared = host.startswith("127.") and not alone
    name = loopback_name(node_rank) if shared else host if node_rank == 0 else facts.hostname
    return Placement(
        "by-hand",
        nodes,
        node_rank,
        facts.nproc(),
        host,
        facts.number("port", DEFAULT_PORT),
        local_name=name,
        nodes_share_host=shared,
    )


READERS: Mapping[str, Callable[[Facts], Placement]] = {
    "torchrun": _torchrun,
    "openmpi": _openmpi,
    "slurm": slurm,
    "kubeflow-v1": kubeflow,
    "kubeflow-v2": kubeflow,
    "jobset": jobset,
    "indexed-job": indexed_job,
    "compose": _compose,
    "by-hand": _by_hand,
    "none": alone,
}
