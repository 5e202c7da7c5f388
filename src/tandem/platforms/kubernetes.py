"""Kubernetes: the pods of a PyTorchJob, a TrainJob, a JobSet and an Indexed Job."""

import re

from tandem.errors import ConfigError
from tandem.platforms.environment import (
    DEFAULT_PORT,
    LOOPBACK,
    Facts,
    Placement,
    said,
    split_address,
    value_range,
    whole,
)


def kubeflow(facts: Facts) -> Placement:
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
        host, text = split_address("PET_RDZV_ENDPOINT", endpoint)
        port, node_rank = whole("PET_RDZV_ENDPOINT", text), facts.number("node_rank", _ordinal(facts))
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


def _kubeflow_range(facts: Facts) -> tuple[int, int]:
    stated, flag = facts.environ.get("PET_NNODES"), facts.flags.get("nodes")
    bounds = value_range("PET_NNODES", stated) if stated else value_range("--nodes", flag or "1")
    if flag is not None and int(flag) != bounds[1]:
        raise ConfigError(f"--nodes={flag} and PET_NNODES={stated} contradict each other; leave --nodes out")
    return bounds


def _check_world_size(facts: Facts, nodes: int, elastic: tuple[int, int] | None) -> None:
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
            f"{said(shown)} contradict each other; "
            f"WORLD_SIZE must be nodes x processes per node ({nodes * per_node})"
        )


def _ordinal(facts: Facts) -> int:
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


def jobset(facts: Facts) -> Placement:
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


def indexed_job(facts: Facts) -> Placement:
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
