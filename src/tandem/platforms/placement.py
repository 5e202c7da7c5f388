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
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, cast

import tandem.platforms
from tandem.config.slices import LaunchConfig
from tandem.errors import ConfigError
from tandem.platforms.environment import Columns, Facts, Placement, said, split_address, value_range

BY_ITSELF = LaunchConfig()  # nothing asked for: the platform alone says

__all__ = ["Placement", "detect", "platforms"]


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
    if asked.master is not None:
        given["host"], given["port"] = split_address("--master", asked.master)
    given |= _meeting(asked, environ, hostname)
    bounds = value_range("--elastic", asked.elastic) if asked.elastic else None
    facts = Facts(environ, hostname, given, bounds)
    platform = next(platform for platform in platforms() if platform.detect(environ))
    return _checked(platform.read(facts), replace(facts, columns=platform.COLUMNS))


def _meeting(asked: LaunchConfig, environ: Mapping[str, str], hostname: str) -> dict[str, str]:
    """The master's address as --init-method gives it; a file needs none, and this host stands in for it."""
    method = asked.init_method
    if method is None:
        return {}
    if not (environ.get("RANK") and environ.get("WORLD_SIZE")):
        raise ConfigError(
            f"--init-method {method} is for ranks that are started by hand: set RANK, WORLD_SIZE and "
            "LOCAL_RANK for each `tandem train`; `tandem launch` starts ranks itself, with --master HOST:PORT"
        )
    if method == "env://":
        return {}
    if asked.master is not None or environ.get("MASTER_ADDR"):
        name = "--master" if asked.master is not None else "MASTER_ADDR"
        raise ConfigError(f"--init-method {method} and {name} both say where ranks meet; give one of them")
    host, port = (hostname, "0") if method.startswith("file:") else split_address("--init-method", method[6:])
    return {"host": host, "port": port}


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
