"""Read the position of a pod of Kubeflow's training operator: of a PyTorchJob (v1) or a TrainJob (v2).

Both set PET_* variables, which torchrun reads as its flags. A PyTorchJob also sets RANK, which is the pod's
index, and WORLD_SIZE, which counts processes.
"""

import re
from collections.abc import Mapping

from tandem.errors import ConfigError
from tandem.platforms.environment import (
    DEFAULT_PORT,
    LOOPBACK,
    Placement,
    PlatformEnv,
    VariableNames,
    any_set,
    assignments,
    parse_integer,
    pod_name,
    split_address,
    value_range,
)

ORDER = 50  # before the Indexed Job, to which a TrainJob's pods belong
ONLY_V1 = ("RANK", "WORLD_SIZE", "PET_RDZV_ENDPOINT")
MARKS = ("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NNODES", "PET_NPROC_PER_NODE")
VARIABLE_NAMES = VariableNames(
    nodes=("PET_NNODES",),
    node_rank=("RANK", "PET_NODE_RANK"),  # RANK without LOCAL_RANK is the pod's index
    nproc=("PET_NPROC_PER_NODE",),
    host=("MASTER_ADDR", "PET_MASTER_ADDR"),
    port=("MASTER_PORT", "PET_MASTER_PORT"),
)


def detect(environ: Mapping[str, str]) -> bool:
    return any_set(environ, (*MARKS, "PET_RDZV_ENDPOINT"))


def read(env: PlatformEnv) -> Placement:
    """Read the position.

    With a Master replica, the store is at MASTER_ADDR, even under an elasticPolicy, where PET_RDZV_ENDPOINT
    points to worker 0. The exit of the master's pod decides the job, so it is node 0 and hosts the store.
    """
    is_v1 = any_set(env.environ, ONLY_V1)
    env = env.for_platform(
        "kubeflow-v1" if is_v1 else "kubeflow-v2", ONLY_V1 if is_v1 else MARKS, VARIABLE_NAMES
    )
    if not env.sources("nodes"):
        raise env.missing("nodes")
    low, high = _kubeflow_range(env)
    # The operator writes MIN:MAX only for an elasticPolicy.
    elastic = (low, high) if ":" in env.environ.get("PET_NNODES", "") else None
    endpoint = env.environ.get("PET_RDZV_ENDPOINT")
    host = env.text("host")
    # A Master replica, or a TrainJob: the address and the rank are set.
    if host is not None:
        node_rank = env.number("node_rank")
        port = env.number("port")
    elif endpoint:
        host, text = split_address("PET_RDZV_ENDPOINT", endpoint)
        port = parse_integer("PET_RDZV_ENDPOINT", text)
        node_rank = env.number("node_rank", _ordinal(env))
    # A single pod needs no rendezvous.
    elif high == 1 and not env.sources("node_rank"):
        host = LOOPBACK
        port = DEFAULT_PORT
        node_rank = 0
    elif env.sources("node_rank"):
        raise env.missing("host")
    else:
        raise ConfigError(
            f"PET_NNODES={env.environ.get('PET_NNODES')} is set but neither MASTER_ADDR nor "
            "PET_RDZV_ENDPOINT: workers alone get no address; "
            "add a Master replica or an elasticPolicy to the PyTorchJob"
        )
    nproc = env.nproc()
    _check_world_size(env, high, elastic)
    return Placement(env.platform, high, node_rank, nproc, host, port, elastic, pod_name(env.hostname, host))


def _kubeflow_range(env: PlatformEnv) -> tuple[int, int]:
    stated = env.environ.get("PET_NNODES")
    flag = env.flags.get("nodes")
    bounds = value_range("PET_NNODES", stated) if stated else value_range("--nodes", flag or "1")
    if flag is not None and int(flag) != bounds[1]:
        given = f"{env.nodes_flag}={flag}"
        raise ConfigError(f"{given} and PET_NNODES={stated} contradict each other; omit --nodes")
    return bounds


def _check_world_size(env: PlatformEnv, nodes: int, elastic: tuple[int, int] | None) -> None:
    """Raise ConfigError unless WORLD_SIZE = pods x nprocPerNode.

    The operator counts an nprocPerNode that is not a number as 1.
    """
    # With an elasticPolicy, the number of pods may change.
    if not env.environ.get("WORLD_SIZE") or elastic:
        return
    stated = env.environ.get("PET_NPROC_PER_NODE") or env.flags.get("nproc", "auto")
    per_node = int(stated) if stated.isdigit() else 1
    if env.variable("WORLD_SIZE") != nodes * per_node:
        shown = {
            name: env.environ[name]
            for name in ("WORLD_SIZE", "PET_NNODES", "PET_NPROC_PER_NODE")
            if name in env.environ
        }
        raise ConfigError(
            f"{assignments(shown)} contradict each other; "
            f"WORLD_SIZE must be nodes x processes per node ({nodes * per_node})"
        )


def _ordinal(env: PlatformEnv) -> int:
    """Return the rank in a pod's name. Elastic workers get no rank, but are named <job>-worker-<rank>."""
    match = re.search(r"-worker-([0-9]+)$", env.hostname.split(".")[0])
    if match is None:
        raise ConfigError(
            f"PET_RDZV_ENDPOINT is set but no RANK, and the host name {env.hostname} does not end "
            "in -worker-N; give --node-rank"
        )
    return int(match[1])
