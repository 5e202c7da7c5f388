"""Where this node stands: environment -> `Placement`, one table of variables per platform.

Every variable that says the same thing stands in the same column, together with the flag for it: those that
are set must agree. What is missing or contradicts is a `ConfigError` that names the variables; a cluster
never becomes a silent world of one. Pure: nothing is resolved, opened or imported here.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tandem.errors import ConfigError

DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"
SIMULATED_NODES_LIMIT = 154  # 127.0.0.101 to 127.0.0.254


@dataclass(frozen=True)
class Placement:
    """One node's position. `nodes` is the upper bound when `elastic` is set; `master_port` 0 = any free one.

    `nproc` None means auto: the GPUs of the node, else 1. `rank`, `local_rank` and `world_size` are set only
    where the platform already started one process per rank (torchrun, Slurm with several tasks per node,
    Open MPI). Node rank 0 hosts the rendezvous at `master_host`; `local_name` is this node's name there.
    """

    platform: str
    nodes: int
    node_rank: int
    nproc: int | None
    master_host: str
    master_port: int
    elastic: tuple[int, int] | None = None
    local_name: str | None = None
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    nodes_share_host: bool = False

    def __str__(self) -> str:
        here = {None: "a process per GPU (else 1) here", 1: "1 process here"}.get(
            self.nproc, f"{self.nproc} processes here"
        )
        position = f"node {self.node_rank} of {self.nodes} ({self.platform}), {here}"
        position += f", master {self.master_host}:{self.master_port}"
        if self.elastic:
            position += f", elastic {self.elastic[0]}:{self.elastic[1]}"
        return position if self.rank is None else f"{position}, rank {self.rank} of {self.world_size}"

    def simulate(self, index: int, port: int) -> "Placement":
        """The placement of node `index` (0-based) when all nodes run on this host, the store on `port`."""
        return replace(self, node_rank=index, master_port=port, local_name=_loopback_name(index))


@dataclass(frozen=True)
class Columns:
    """Variables by meaning; those set must agree with each other and with the flag of that name."""

    nodes: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    nproc: tuple[str, ...] = ()
    host: tuple[str, ...] = ("MASTER_ADDR",)
    port: tuple[str, ...] = ("MASTER_PORT",)


KUBEFLOW = Columns(
    nodes=("PET_NNODES",),
    node_rank=("RANK", "PET_NODE_RANK"),  # RANK without LOCAL_RANK is the pod's index
    nproc=("PET_NPROC_PER_NODE",),
    host=("MASTER_ADDR", "PET_MASTER_ADDR"),
    port=("MASTER_PORT", "PET_MASTER_PORT"),
)
COLUMNS: Mapping[str, Columns] = {
    "torchrun": Columns(("GROUP_WORLD_SIZE",), ("GROUP_RANK",), ("LOCAL_WORLD_SIZE",)),
    "openmpi": Columns(nproc=("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    "slurm": Columns(("SLURM_STEP_NUM_NODES",), ("SLURM_NODEID",)),
    "kubeflow-v1": KUBEFLOW,
    "kubeflow-v2": KUBEFLOW,
    "jobset": Columns(("NODES", "NNODES"), ("NODE_RANK", "JOB_COMPLETION_INDEX")),
    "indexed-job": Columns(("NNODES",), ("NODE_RANK", "JOB_COMPLETION_INDEX")),
    "compose": Columns(("TANDEM_COMPOSE_NODES",), host=(), port=()),
    "by-hand": Columns(("NNODES",), ("NODE_RANK",)),
}
# The first platform with a variable set is the one, most specific first: torchrun runs inside Slurm and
# inside pods, mpirun inside Slurm, TrainJob and JobSet pods are pods of an Indexed Job.
MARKS: Mapping[str, tuple[str, ...]] = {
    "torchrun": ("LOCAL_RANK", "TORCHELASTIC_RUN_ID"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "slurm": ("SLURM_JOB_ID",),
    "kubeflow-v1": ("RANK", "WORLD_SIZE", "PET_RDZV_ENDPOINT"),
    "kubeflow-v2": (
        "PET_NODE_RANK",
        "PET_MASTER_ADDR",
        "PET_MASTER_PORT",
        "PET_NNODES",
        "PET_NPROC_PER_NODE",
    ),
    "jobset": ("JOBSET_NAME",),
    "indexed-job": ("JOB_COMPLETION_INDEX",),
    "compose": ("TANDEM_COMPOSE_NODES", "TANDEM_COMPOSE_INDEX", "TANDEM_COMPOSE_PROJECT"),
    "by-hand": ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
}


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
        platform == "none" or (platform == "slurm" and not _in_step(environ) and node_rank is not None)
    ):
        platform = "by-hand"
    flags = {"nodes": nodes, "node_rank": node_rank, "nproc": None if nproc == "auto" else nproc}
    given = {name: str(value) for name, value in flags.items() if value is not None}
    if master is not None:
        given["host"], given["port"] = _split_address("--master", master)
    bounds = _range("--elastic", elastic) if isinstance(elastic, str) else elastic
    facts = _Facts(
        environ, hostname, platform, COLUMNS.get(platform, Columns((), (), (), (), ())), given, bounds
    )
    return _checked(READERS[platform](facts), facts)


@dataclass(frozen=True)
class _Facts:
    """What a platform's reader may look at: variables, host name and flags (as text, by column)."""

    environ: Mapping[str, str]
    hostname: str
    platform: str
    columns: Columns
    flags: Mapping[str, str]
    elastic: tuple[int, int] | None

    def sources(self, column: str) -> dict[str, str]:
        """Where this column is given: flag or variable -> text, empty variables left out."""
        names: tuple[str, ...] = getattr(self.columns, column)
        found = {name: value for name in names if (value := self.environ.get(name))}
        flag = "--master" if column in ("host", "port") else "--" + column.replace("_", "-")
        return {flag: self.flags[column], **found} if column in self.flags else found

    def text(self, column: str) -> str | None:
        """The one value all sources of a column agree on; None when nothing gives it."""
        sources = self.sources(column)
        if len(set(sources.values())) > 1:
            raise ConfigError(f"{_said(sources)} contradict each other; they must be equal ({self.platform})")
        return next(iter(sources.values()), None)

    def number(self, column: str, default: int | None = None) -> int:
        """A whole number of a column; ConfigError when nothing gives it and there is no default."""
        value = self.text(column)
        if value is None:
            if default is None:
                raise self.missing(column)
            return default
        return _whole(next(iter(self.sources(column))), value)

    def variable(self, name: str) -> int:
        value = self.environ.get(name)
        if not value:
            raise ConfigError(f"{self.seen()} but {name} is not; {self.platform} needs it")
        return _whole(name, value)

    def host(self) -> str:
        host = self.text("host")
        if host is None:
            raise self.missing("host")
        return host

    def nproc(self) -> int | None:
        """Processes per node; None for auto. The platform's `auto` is a default, so a flag may fill it in."""
        sources = {
            name: value for name, value in self.sources("nproc").items() if value not in ("auto", "gpu")
        }
        numbers = {name: _whole(name, value, 1, "auto or ") for name, value in sources.items()}
        if len(set(numbers.values())) > 1:
            raise ConfigError(f"{_said(sources)} contradict each other; set one of them to auto")
        return next(iter(numbers.values()), None)

    def missing(self, column: str) -> ConfigError:
        names: tuple[str, ...] = getattr(self.columns, column)
        flag = {"host": "--master HOST:PORT", "port": "--master HOST:PORT"}.get(
            column, "--" + column.replace("_", "-")
        )
        return ConfigError(
            f"{self.seen()} but {' and '.join(names) or flag} is not ({self.platform}); set it or give {flag}"
        )

    def seen(self) -> str:
        """The variables and flags that made this platform, for the head of a message."""
        marks = {name: value for name in MARKS.get(self.platform, ()) if (value := self.environ.get(name))}
        flags = [
            flag for flag, on in (("--master", "host"), ("--node-rank", "node_rank")) if on in self.flags
        ]
        said = ", ".join([_said(marks)] * bool(marks) + flags)
        return f"{said} {'is' if len(marks) + len(flags) == 1 else 'are'} set"


def _said(sources: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sources.items())


def _whole(name: str, value: str, minimum: int = 0, also: str = "") -> int:
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < minimum:
        raise ConfigError(f"{name}={value!r} is not valid; give {also}a whole number from {minimum} up")
    return int(value)


def _range(name: str, value: str) -> tuple[int, int]:
    low, _, high = value.partition(":")
    bounds = (_whole(name, low, 1, "MIN:MAX or "), _whole(name, high or low, 1, "MIN:MAX or "))
    if bounds[0] > bounds[1]:
        raise ConfigError(f"{name}={value} has its minimum above its maximum; give MIN:MAX, as in 1:2")
    return bounds


def _split_address(name: str, value: str) -> tuple[str, str]:
    host, _, port = value.rpartition(":")
    if not host.strip("[]") or not port or (":" in host and not host.startswith("[")):
        raise ConfigError(
            f"{name}={value!r} is not an address; give HOST:PORT, as in {name} node1:{DEFAULT_PORT}"
        )
    return host.strip("[]"), port


def _loopback_name(index: int) -> str:
    return f"127.0.0.{101 + index}"


def _checked(placement: Placement, facts: _Facts) -> Placement:
    """Bounds that hold on every platform."""
    given = _said({**facts.sources("nodes"), **facts.sources("node_rank")}) or str(placement)
    if placement.nodes < 1 or placement.node_rank >= placement.nodes:
        raise ConfigError(
            f"node {placement.node_rank} of {placement.nodes} cannot be ({given}, host {facts.hostname}); "
            f"{placement.platform} counts nodes from 0 to nodes - 1"
        )
    if placement.master_port > 65535:
        raise ConfigError(
            f"master port {placement.master_port} is not valid ({_said(facts.sources('port'))}); "
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


def _torchrun(facts: _Facts) -> Placement:
    rank, local_rank, world = (facts.variable(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    nproc = facts.variable("LOCAL_WORLD_SIZE")
    facts.nproc()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if nproc < 1 or rank >= world or local_rank >= nproc or nproc > world:
        raise ConfigError(
            f"{_said({name: facts.environ[name] for name in names})} contradict each other; "
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


def _openmpi(facts: _Facts) -> Placement:
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


def _kubeflow(facts: _Facts) -> Placement:
    """PyTorchJob (v1) and TrainJob (v2).

    With a Master the store is at MASTER_ADDR also under an elasticPolicy, where PET_RDZV_ENDPOINT names
    worker 0: node rank 0, whose end decides the job, is the master's pod and has to host it.
    """
    if not facts.sources("nodes"):
        if facts.platform == "kubeflow-v1" and not any(name.startswith("PET_") for name in facts.environ):
            raise ConfigError(
                f"{facts.seen()} but neither LOCAL_RANK (torchrun sets it) nor PET_NNODES (a PyTorchJob); "
                "start with torchrun, or unset RANK and WORLD_SIZE"
            )
        raise facts.missing("nodes")
    low, high = _kubeflow_range(facts)
    elastic = (low, high) if ":" in facts.environ.get("PET_NNODES", "") else None
    endpoint = facts.environ.get("PET_RDZV_ENDPOINT")
    host = facts.text("host")
    if host is not None:
        node_rank, port = facts.number("node_rank"), facts.number("port")
    elif endpoint:
        host, text = _split_address("PET_RDZV_ENDPOINT", endpoint)
        port, node_rank = _whole("PET_RDZV_ENDPOINT", text), facts.number("node_rank", _ordinal(facts))
    elif high == 1 and not facts.sources("node_rank"):
        host, port, node_rank = LOOPBACK, DEFAULT_PORT, 0
    elif facts.sources("node_rank"):
        raise facts.missing("host")
    else:
        raise ConfigError(
            f"PET_NNODES={facts.environ.get('PET_NNODES')} is set but neither MASTER_ADDR nor "
            "PET_RDZV_ENDPOINT: workers alone get no address; "
            "add a Master replica or an elasticPolicy to the PyTorchJob"
        )
    nproc = facts.nproc()
    _check_world_size(facts, high, elastic)
    return Placement(
        facts.platform, high, node_rank, nproc, host, port, elastic, _pod_name(facts.hostname, host)
    )


def _kubeflow_range(facts: _Facts) -> tuple[int, int]:
    stated, flag = facts.environ.get("PET_NNODES"), facts.flags.get("nodes")
    bounds = _range("PET_NNODES", stated) if stated else _range("--nodes", flag or "1")
    if flag is not None and int(flag) != bounds[1]:
        raise ConfigError(f"--nodes={flag} and PET_NNODES={stated} contradict each other; leave --nodes out")
    return bounds


def _check_world_size(facts: _Facts, nodes: int, elastic: tuple[int, int] | None) -> None:
    """WORLD_SIZE = pods x nprocPerNode, where a nprocPerNode that is no number counts as 1."""
    if not facts.environ.get("WORLD_SIZE") or elastic:
        return
    stated = facts.environ.get("PET_NPROC_PER_NODE") or facts.flags.get("nproc", "auto")
    per_node = int(stated) if stated.isdigit() else 1
    if facts.variable("WORLD_SIZE") != nodes * per_node:
        shown = {
            name: facts.environ[name]
            for name in ("WORLD_SIZE", "PET_NNODES", "PET_NPROC_PER_NODE")
            if name in facts.environ
        }
        raise ConfigError(
            f"{_said(shown)} contradict each other; "
            f"WORLD_SIZE must be nodes x processes per node ({nodes * per_node})"
        )


def _ordinal(facts: _Facts) -> int:
    """Elastic workers get no rank, but their pods are named <job>-worker-<rank>."""
    match = re.search(r"-worker-([0-9]+)$", facts.hostname.split(".")[0])
    if match is None:
        raise ConfigError(
            f"PET_RDZV_ENDPOINT is set but no RANK, and the host name {facts.hostname} does not end "
            "in -worker-N; give --node-rank"
        )
    return int(match[1])


def _pod_name(hostname: str, master: str) -> str:
    """The pod's name with the master's domain, where both are pods of one set: short ones do not resolve."""
    pod, (first, _, domain) = hostname.split(".")[0], master.partition(".")
    same_set = re.sub(r"(-[0-9]+)+$", "", pod) == re.sub(r"(-[0-9]+)+$", "", first)
    return f"{pod}.{domain}" if domain and same_set else pod


def _jobset(facts: _Facts) -> Placement:
    """The manifest sets JOBSET_NAME, REPLICATED_JOB_NAME and NODES; pod names follow from them."""
    names = [facts.environ.get(name) for name in ("JOBSET_NAME", "REPLICATED_JOB_NAME")]
    host = facts.text("host")
    if host is None and not all(names):
        raise ConfigError(
            "JOBSET_NAME is set but neither REPLICATED_JOB_NAME nor MASTER_ADDR; "
            "set one in the container's env"
        )
    host = host or f"{names[0]}-{names[1]}-0-0.{names[0]}"
    return Placement(
        "jobset",
        facts.number("nodes"),
        facts.number("node_rank"),
        facts.nproc(),
        host,
        facts.number("port", DEFAULT_PORT),
        local_name=_pod_name(facts.hostname, host),
    )


def _indexed_job(facts: _Facts) -> Placement:
    """An Indexed Job says only its index; the manifest or the flags must say how many and where."""
    host, nodes = facts.text("host"), facts.number("nodes")
    if host is None and nodes > 1:
        raise facts.missing("host")
    host = host or LOOPBACK
    return Placement(
        "indexed-job",
        nodes,
        facts.number("node_rank"),
        facts.nproc(),
        host,
        facts.number("port", DEFAULT_PORT),
        local_name=_pod_name(facts.hostname, host),
    )


def _compose(facts: _Facts) -> Placement:
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


def _in_step(environ: Mapping[str, str]) -> bool:
    """Inside `srun`: the batch script and the interactive shell have no step id, or a reserved one."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < 0xFFFFFF00


def _slurm(facts: _Facts) -> Placement:
    """One task per node: that task is the node's agent. Several: each task is a rank already."""
    if not _in_step(facts.environ):
        return _slurm_without_step(facts)
    nodes, node_rank = facts.number("nodes"), facts.number("node_rank")
    names = expand_nodelist(
        facts.environ.get("SLURM_STEP_NODELIST") or facts.environ.get("SLURM_JOB_NODELIST", "")
    )
    here = facts.environ.get("SLURMD_NODENAME") or facts.hostname
    if (
        len(names) != nodes
        or node_rank >= nodes
        or (facts.environ.get("SLURMD_NODENAME") and names[node_rank] != here)
    ):
        raise ConfigError(
            f"SLURM_STEP_NODELIST={','.join(names)}, SLURM_STEP_NUM_NODES={nodes}, SLURM_NODEID={node_rank} "
            f"and SLURMD_NODENAME={here} contradict each other; start with srun, and set none of them by hand"
        )
    host = facts.text("host") or names[0]
    if host.split(".")[0] in names[1:]:
        raise ConfigError(
            f"{_said(facts.sources('host'))} is not the step's first node {names[0]}, "
            "where rank 0 is; leave it out"
        )
    # Two jobs, or two steps of one job, may share a node: their stores must not share a port.
    step = facts.variable("SLURM_JOB_ID") + 131 * facts.variable("SLURM_STEP_ID")
    placement = Placement(
        "slurm",
        nodes,
        node_rank,
        facts.nproc(),
        host,
        facts.number("port", 20000 + step % 10000),
        local_name=here,
    )
    tasks = expand_tasks(
        facts.environ.get("SLURM_STEP_TASKS_PER_NODE", "1" if nodes == 1 else f"1(x{nodes})")
    )
    if len(tasks) != nodes:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE names {len(tasks)} nodes but SLURM_STEP_NUM_NODES={nodes}; "
            "start with srun"
        )
    return placement if max(tasks) == 1 else _slurm_ranks(facts, placement, tasks)


def _slurm_ranks(facts: _Facts, placement: Placement, tasks: list[int]) -> Placement:
    rank, local_rank, here = (
        facts.variable("SLURM_PROCID"),
        facts.variable("SLURM_LOCALID"),
        tasks[placement.node_rank],
    )
    if rank >= sum(tasks) or local_rank >= here or placement.nproc not in (None, here):
        raise ConfigError(
            f"SLURM_PROCID={rank}, SLURM_LOCALID={local_rank} and --nproc={placement.nproc or 'auto'} "
            f"contradict {here} tasks here of {sum(tasks)}; "
            "start one task per node (--ntasks-per-node=1), or leave --nproc out"
        )
    return replace(placement, nproc=here, rank=rank, local_rank=local_rank, world_size=sum(tasks))


def _slurm_without_step(facts: _Facts) -> Placement:
    """A batch script or a shell in an allocation: fine for one node, otherwise the other nodes would idle."""
    counts = {name: facts.environ.get(name) or "1" for name in ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS")}
    if any(_whole(name, value, 1) > 1 for name, value in counts.items()):
        raise ConfigError(
            f"{_said(counts)} but this is not a step (no SLURM_STEP_ID); start it with srun: "
            "srun --ntasks-per-node=1 tandem launch ..."
        )
    return replace(_alone(facts), platform="slurm")


def _by_hand(facts: _Facts) -> Placement:
    """From the flags, or NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT; one node needs fewer."""
    nodes = facts.number("nodes")
    alone = nodes == 1
    host = facts.text("host") or (LOOPBACK if alone else None)
    if host is None:
        raise facts.missing("host")
    node_rank = facts.number("node_rank", 0 if alone else None)
    shared = host.startswith("127.") and not alone
    name = _loopback_name(node_rank) if shared else host if node_rank == 0 else facts.hostname
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


def _alone(facts: _Facts) -> Placement:
    """No platform: one node, or `--nodes N` simulated on this host, each under its own loopback address."""
    nodes = int(facts.flags.get("nodes", facts.elastic[1] if facts.elastic else 1))
    if nodes > SIMULATED_NODES_LIMIT:
        raise ConfigError(
            f"--nodes={nodes} is too many for one host; give 1 to {SIMULATED_NODES_LIMIT}, "
            "or --node-rank and --master"
        )
    shared = nodes > 1
    name = _loopback_name(0) if shared else LOOPBACK
    return Placement("none", nodes, 0, facts.nproc(), name, 0, local_name=name, nodes_share_host=shared)


READERS: Mapping[str, Callable[[_Facts], Placement]] = {
    "torchrun": _torchrun,
    "openmpi": _openmpi,
    "slurm": _slurm,
    "kubeflow-v1": _kubeflow,
    "kubeflow-v2": _kubeflow,
    "jobset": _jobset,
    "indexed-job": _indexed_job,
    "compose": _compose,
    "by-hand": _by_hand,
    "none": _alone,
}


def expand_nodelist(text: str) -> list[str]:
    """Slurm's host list as names in order: `node[1-2,7],gpu-a[01-02]` -> node1 node2 node7 gpu-a01 gpu-a02.

    Several brackets in one name multiply, the last varying fastest. Raises ConfigError when malformed.
    """
    names = [
        name
        for item in re.findall(r"(?:\[[^\]]*\]|[^,\[])+|[,\[]", text)
        if item != ","
        for name in _expand_name(item, text)
    ]
    if not names:
        raise ConfigError(f"Slurm's node list {text!r} is empty; start with srun")
    return names


def _expand_name(item: str, whole: str) -> list[str]:
    names = [""]
    for part in re.findall(r"\[[^\]]*\]|[^\[\]]+|[\[\]]", item):
        if part.startswith("["):
            names = [name + number for name in names for number in _expand_bracket(part, whole)]
        elif part == "]" or not re.fullmatch(r"[A-Za-z0-9._-]+", part):
            raise ConfigError(f"{whole!r} is not a Slurm node list; an example is node[1-3,7],gpu-a[01-02]")
        else:
            names = [name + part for name in names]
    return names


def _expand_bracket(bracket: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for entry in bracket[1:-1].split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", entry)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first) or int(last) - int(first) > 100_000:
            raise ConfigError(f"{whole!r} is not a Slurm node list; an example is node[1-3,7],gpu-a[01-02]")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def expand_tasks(text: str) -> list[int]:
    """Slurm's tasks per node in node order: `2(x3),1` -> 2 2 2 1. Raises ConfigError when malformed."""
    tasks: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"([1-9][0-9]{0,5})(?:\(x([1-9][0-9]{0,5})\))?", entry)
        if match is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not valid; an example is 2(x3),1")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks
