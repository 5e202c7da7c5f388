"""Where this node stands: environment -> `Placement`, by the platform that it is on.

Each platform is one module of this package, and whoever adds one touches nothing else. It declares

    ORDER                         when it is asked: the first that stands here is the one
    COLUMNS                       its names for what all platforms say
    detect(environ) -> bool       whether it stands here
    read(facts) -> Placement      what it says; raises ConfigError

The order is from the most specific to the most general: what may run inside another is asked before it, and
beside each ORDER stands its reason. No two are equal.

What is missing or contradicts is a `ConfigError` that names the variables; a cluster never becomes a silent
world of one. No name is resolved and no connection opened here; a list of hosts that a scheduler has put into
a file may be read.
"""

import functools
import importlib
import os
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, cast

import tandem.platforms
from tandem.config.slices import LaunchConfig
from tandem.errors import ConfigError
from tandem.platforms import slurm
from tandem.platforms.environment import (
    DEFAULT_PORT,
    Columns,
    Facts,
    Placement,
    said,
    split_address,
    value_range,
)
from tandem.platforms.replica import with_index

BY_ITSELF = LaunchConfig()  # nothing asked for: the platform alone says

__all__ = ["Placement", "detect", "of_this_process", "on_this_host", "outside_steps", "platforms"]


class Platform(Protocol):
    """A module of this package that declares ORDER."""

    ORDER: int
    COLUMNS: Columns

    def detect(self, environ: Mapping[str, str]) -> bool: ...
    def read(self, facts: Facts) -> Placement: ...


@functools.cache
def platforms() -> Sequence[Platform]:
    """Every platform, in the order of asking."""
    names = (module.name for module in pkgutil.iter_modules(tandem.platforms.__path__))
    modules = (importlib.import_module(f"tandem.platforms.{name}") for name in names if name != "placement")
    found = [cast(Platform, module) for module in modules if hasattr(module, "ORDER")]
    return sorted(found, key=lambda platform: platform.ORDER)


def detect(environ: Mapping[str, str], hostname: str, asked: LaunchConfig = BY_ITSELF) -> Placement:
    """This node's placement from the environment, the host's name and what was asked for.

    Raises ConfigError, one line, naming the variables that are missing, malformed or contradict each other.
    """
    flags = {"nodes": asked.nodes, "node_rank": asked.node_rank}
    given = {name: str(value) for name, value in flags.items() if value is not None}
    if asked.nproc != "auto":
        given["nproc"] = str(asked.nproc)
    if asked.master is not None and asked.master.startswith("file:"):
        _check_file(asked.master, environ)
        given |= {"host": hostname, "port": str(DEFAULT_PORT)}  # a file needs none, and this stands in for it
    elif asked.master is not None:
        given["host"], given["port"] = split_address("--master", asked.master)
    bounds = value_range("--elastic", asked.elastic) if asked.elastic else None
    facts = Facts(environ, hostname, given, bounds)
    platform = next(platform for platform in platforms() if platform.detect(environ))
    return _checked(platform.read(facts), replace(facts, columns=platform.COLUMNS))


def of_this_process(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment with what only this host knows: the replica's index, and which Slurm step this is.

    Raises ConfigError.
    """
    return with_index(slurm.without_inherited_step(environ, os.getpid()))


def outside_steps(environ: Mapping[str, str]) -> Mapping[str, str]:
    """As `of_this_process`, without the allocation of a shell or batch script: Slurm places only steps.

    For verbs that need one host. Raises ConfigError.
    """
    environ = of_this_process(environ)
    return slurm.without_job(environ) if slurm.detect(environ) and not slurm.in_step(environ) else environ


def on_this_host(verb: str, environ: Mapping[str, str], hostname: str) -> Mapping[str, str]:
    """The environment for runs that a verb starts itself on this host, also inside a Slurm allocation.

    Raises ConfigError where the platform has started this process for each node or rank: each would start its
    own.
    """
    environ = outside_steps(environ)
    placement = detect(environ, hostname)
    if placement.platform == "none":
        return environ
    if placement.platform == "slurm" and placement.nodes == 1 and placement.rank is None:
        return slurm.without_job(environ)  # srun --pty bash
    raise ConfigError(f"{verb} starts its own ranks, but this is a rank or node of {placement.platform}")


def _check_file(master: str, environ: Mapping[str, str]) -> None:
    """Raise ConfigError where ranks do not meet in a file."""
    if not (environ.get("RANK") and environ.get("WORLD_SIZE")):
        raise ConfigError(
            f"--master {master} is for ranks started by hand: set RANK, WORLD_SIZE and "
            "LOCAL_RANK for each `tandem train`; `tandem launch` starts ranks itself, with --master HOST:PORT"
        )
    if environ.get("MASTER_ADDR"):
        raise ConfigError(
            f"--master {master} and MASTER_ADDR both set where ranks meet; give only one of them"
        )


def _checked(placement: Placement, facts: Facts) -> Placement:
    """Bounds that hold on every platform."""
    given = said({**facts.sources("nodes"), **facts.sources("node_rank")}) or str(placement)
    if placement.nodes < 1 or placement.node_rank >= placement.nodes:
        raise ConfigError(
            f"invalid node {placement.node_rank} of {placement.nodes} ({given}, host {facts.hostname}); "
            f"{placement.platform} numbers nodes from 0 to nodes - 1"
        )
    if placement.master_port > 65535:
        raise ConfigError(
            f"invalid master port {placement.master_port} ({said(facts.sources('port'))}); "
            "expected 1 to 65535"
        )
    is_single = placement.nodes == 1 and (placement.world_size or 1) == 1
    if placement.master_port == 0 and not (placement.starts_all or is_single):
        raise ConfigError(
            f"invalid master port 0 ({said(facts.sources('port'))}); expected 1 to 65535, the same on all "
            f"nodes, such as --master {placement.master_host}:{DEFAULT_PORT}"
        )
    if facts.elastic is None:
        return placement
    if placement.rank is not None:
        raise ConfigError(
            f"--elastic cannot be used with ranks that {placement.platform} starts itself; "
            "start one task per node"
        )
    stated = placement.elastic or facts.elastic
    if stated != facts.elastic or not facts.elastic[0] <= placement.nodes <= facts.elastic[1]:
        raise ConfigError(
            f"--elastic {facts.elastic[0]}:{facts.elastic[1]} contradicts {given}; make them the same range"
        )
    return replace(placement, elastic=facts.elastic)
