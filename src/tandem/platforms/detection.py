"""Find this node's `Placement` from the environment, by the platform that it runs on.

Each platform is one module of this package, which is discovered automatically. It declares

    ORDER                         when it is checked: the first that detects itself is used
    VARIABLE_NAMES                its variables for the values that all platforms have
    detect(environ) -> bool       whether this process runs on it
    read(env) -> Placement        the position; raises ConfigError

The order is from the most specific platform to the most general: what may run inside another is checked
before it. A comment next to each ORDER has the reason. No two are equal.

Missing or contradictory values are a `ConfigError` that names the variables. A cluster never silently becomes
a job of one node. Nothing here resolves a name or opens a connection; a scheduler's file with a list of hosts
may be read.
"""

import functools
import importlib
import os
import pkgutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, cast

import tandem.platforms
from tandem.config.slices import LaunchConfig
from tandem.errors import ConfigError
from tandem.platforms import slurm
from tandem.platforms.compose import with_index
from tandem.platforms.environment import (
    DEFAULT_PORT,
    Placement,
    PlatformEnv,
    VariableNames,
    assignments,
    split_address,
    value_range,
)

BY_ITSELF = LaunchConfig()  # no flags, so the platform alone decides

__all__ = [
    "Placement",
    "detect",
    "detect_here",
    "of_this_process",
    "on_this_host",
    "outside_steps",
    "platforms",
]


class Platform(Protocol):
    """A module of this package that declares ORDER."""

    ORDER: int
    VARIABLE_NAMES: VariableNames

    def detect(self, environ: Mapping[str, str]) -> bool: ...
    def read(self, env: PlatformEnv) -> Placement: ...


@functools.cache
def platforms() -> Sequence[Platform]:
    """Return every platform, in the order in which they are checked."""
    names = (module.name for module in pkgutil.iter_modules(tandem.platforms.__path__))
    modules = (importlib.import_module(f"tandem.platforms.{name}") for name in names if name != "detection")
    found = [cast(Platform, module) for module in modules if hasattr(module, "ORDER")]
    return sorted(found, key=lambda platform: platform.ORDER)


def detect(environ: Mapping[str, str], hostname: str, asked: LaunchConfig = BY_ITSELF) -> Placement:
    """Return this node's placement from the environment, the host name, and the launch settings `asked`.

    Raises ConfigError, one line, which names the variables that are missing, malformed or contradictory.
    """
    # A platform counts all nodes, both those that train and those that wait.
    nodes = asked.nodes and asked.nodes + asked.spares
    flags = {"nodes": nodes, "node_rank": asked.node_rank}
    given = {name: str(value) for name, value in flags.items() if value is not None}
    if asked.nproc != "auto":
        given["nproc"] = str(asked.nproc)
    if asked.master is not None and asked.master.startswith("file:"):
        _check_file(asked.master, environ)
        given |= {"host": hostname, "port": str(DEFAULT_PORT)}  # a file needs no address, so any will do
    elif asked.master is not None:
        given["host"], given["port"] = split_address("--master", asked.master)
    bounds = value_range("--elastic", asked.elastic) if asked.elastic else None
    env = PlatformEnv(environ, hostname, given, bounds, spares=asked.spares)
    # One always matches: laptop.py, the last in order, detects anything.
    platform = next(platform for platform in platforms() if platform.detect(environ))
    placement = _checked(platform.read(env), replace(env, variable_names=platform.VARIABLE_NAMES))
    return _with_spares(placement, asked.spares) if asked.spares else placement


def of_this_process(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment with what only this host knows: the replica's index and the real Slurm step.

    Raises ConfigError.
    """
    return with_index(slurm.without_inherited_step(environ, os.getpid()))


def detect_here(environ: Mapping[str, str], asked: LaunchConfig = BY_ITSELF) -> Placement:
    """Return this process's placement: `detect` with what only this host knows. Raises ConfigError."""
    return detect(of_this_process(environ), socket.gethostname(), asked)


def outside_steps(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the same as `of_this_process`, but without a Slurm allocation around a shell or batch script.

    For verbs that need only this host: Slurm places only steps. Raises ConfigError.
    """
    environ = of_this_process(environ)
    return slurm.without_job(environ) if slurm.detect(environ) and not slurm.in_step(environ) else environ


def on_this_host(verb: str, environ: Mapping[str, str], hostname: str) -> Mapping[str, str]:
    """Return the environment for runs that a verb itself starts on this host, even in a Slurm allocation.

    Raises ConfigError if the platform started one process per node or rank: each would start its own run.
    """
    environ = outside_steps(environ)
    placement = detect(environ, hostname)
    if placement.platform == "none":
        return environ
    if placement.platform == "slurm" and placement.nodes == 1 and placement.rank is None:
        return slurm.without_job(environ)  # srun --pty bash
    raise ConfigError(f"{verb} starts its own ranks, but this is a rank or node of {placement.platform}")


def _check_file(master: str, environ: Mapping[str, str]) -> None:
    """Raise ConfigError unless these ranks can connect through a file."""
    if not (environ.get("RANK") and environ.get("WORLD_SIZE")):
        raise ConfigError(
            f"--master {master} is for ranks started by hand: set RANK, WORLD_SIZE and "
            "LOCAL_RANK for each `tandem train`; `tandem launch` starts ranks itself, with --master HOST:PORT"
        )
    if environ.get("MASTER_ADDR"):
        raise ConfigError(
            f"--master {master} and MASTER_ADDR both set where ranks meet; give only one of them"
        )


def _checked(placement: Placement, env: PlatformEnv) -> Placement:
    """Check the limits that hold on every platform, and apply --elastic. Raises ConfigError."""
    given = assignments({**env.sources("nodes"), **env.sources("node_rank")}) or str(placement)
    if placement.nodes < 1 or placement.node_rank >= placement.nodes:
        raise ConfigError(
            f"invalid node {placement.node_rank} of {placement.nodes} ({given}, host {env.hostname}); "
            "nodes are numbered from 0 to nodes - 1"
        )
    if placement.master_port > 65535:
        raise ConfigError(
            f"invalid master port {placement.master_port} ({assignments(env.sources('port'))}); "
            "expected 1 to 65535"
        )
    is_single = placement.nodes == 1 and (placement.world_size or 1) == 1
    # Only this process needs to know a port that the kernel chooses.
    if placement.master_port == 0 and not (placement.starts_all or is_single):
        raise ConfigError(
            f"invalid master port 0 ({assignments(env.sources('port'))}); expected 1 to 65535, the same on "
            f"all nodes, such as --master {placement.master_host}:{DEFAULT_PORT}"
        )
    if env.elastic is None:
        return placement
    if placement.rank is not None:
        raise ConfigError(
            f"--elastic cannot be used with ranks that {placement.platform} starts itself; "
            "start one task per node"
        )
    stated = placement.elastic or env.elastic
    if stated != env.elastic or not env.elastic[0] <= placement.nodes <= env.elastic[1]:
        raise ConfigError(
            f"--elastic {env.elastic[0]}:{env.elastic[1]} contradicts {given}; make them the same range"
        )
    return replace(placement, elastic=env.elastic)


def _with_spares(placement: Placement, spares: int) -> Placement:
    """Return the placement with `spares` of its nodes waiting. Raises ConfigError."""
    if placement.rank is not None:
        raise ConfigError(
            f"--spares cannot be used with ranks that {placement.platform} starts itself; "
            "start one task per node"
        )
    if placement.elastic is not None:
        raise ConfigError(
            "--spares and --elastic contradict each other: an elastic job trains on all nodes that come; "
            "give --nodes instead of --elastic"
        )
    if (nodes := placement.nodes - spares) < 2:
        raise ConfigError(
            f"--spares {spares}: of {placement.nodes} nodes, {max(0, nodes)} would train; a spare can "
            f"replace any node but the first, so start at least {spares + 2}, or give --nodes 2"
        )
    return replace(placement, nodes=nodes, spares=spares)
