"""Define the input of every platform's reader, `PlatformEnv`, and its result, `Placement`.

A column contains the variables with one meaning, and the flag for it; all that are set must agree. This
module resolves no names and opens no connections.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tandem.errors import ConfigError

DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"


NAMELESS = ("none", "by-hand")
"""Platforms whose names are left out of messages, because they add no information."""


@dataclass(frozen=True)
class Placement:
    """One node's position in the job.

    `nodes` is the upper bound if `elastic` is set. `nproc` is the number of ranks per node; None means one
    per GPU, or 1. `master_port` 0 means any free port. `rank`, `local_rank` and `world_size` are set only if
    the platform already started one process per rank (torchrun, Slurm with several tasks per node, Open MPI,
    ranks set by hand). Node rank 0 hosts the rendezvous at `master_host`; `local_name` is this node's name
    there.

    `starts_all`: this process starts all nodes itself, on this host, so the nodes need no agreed port (a
    laptop, or a Slurm allocation without srun). `one_process_per_node`: the platform started this process
    once on every node. `job` identifies the job if several may share a host. `array` is (array, task) for a
    task of a job array. `restarts` is how often the platform has restarted this job. `device` is the index of
    this rank's GPU among those that it sees. `spares`: the number of further nodes that wait; their node
    ranks begin at `nodes`.
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
    starts_all: bool = False
    one_process_per_node: bool = False
    job: str = ""
    array: tuple[str, str] | None = None
    restarts: int = 0
    device: int | None = None
    spares: int = 0

    def as_rank(self) -> "Placement":
        """Return this process's placement as a rank; a node's only task becomes its rank.

        Raises ConfigError for settings that need a node's agent.
        """
        if self.rank is not None or not self.one_process_per_node or self.nodes == 1:
            return self
        if self.elastic or self.spares or self.nproc not in (None, 1):
            asked = "--elastic" if self.elastic else "--spares" if self.spares else f"--nproc={self.nproc}"
            raise ConfigError(
                f"{asked} is for a node's agent, but this is one rank of {self.nodes}, a task on each node; "
                "start with tandem launch, or omit it"
            )
        return replace(self, nproc=1, rank=self.node_rank, local_rank=0, world_size=self.nodes)

    @property
    def master(self) -> tuple[str, int]:
        """The address of the rendezvous, as sockets take it."""
        return self.master_host, self.master_port

    @property
    def is_one_host(self) -> bool:
        """True if all nodes are on this host, so that no other host needs to connect."""
        # An elastic job may begin with one node and grow, so its store must be reachable from other hosts.
        return self.nodes_share_host or (self.nodes == 1 and (self.elastic or (1, 1))[1] == 1)

    def by_loopback(self) -> "Placement":
        """Return the placement with a loopback master if all nodes are on this host."""
        is_named = self.is_one_host and not self.nodes_share_host
        return replace(self, master_host=LOOPBACK) if is_named else self

    def __str__(self) -> str:
        here = {None: "1 process, or 1 per GPU", 1: "1 process"}.get(self.nproc, f"{self.nproc} processes")
        platform = "" if self.platform in NAMELESS else f" ({self.platform})"
        beyond = "spare " if self.node_rank >= self.nodes else ""
        position = f"{beyond}node {self.node_rank} of {self.nodes + self.spares}{platform}, {here}"
        position += f", master {self.master_host}:{self.master_port}"
        if self.elastic:
            position += f", elastic {self.elastic[0]}:{self.elastic[1]}"
        if self.spares:
            position += f", {self.spares} of them waiting"
        return position if self.rank is None else f"{position}, rank {self.rank} of {self.world_size}"


@dataclass(frozen=True)
class VariableNames:
    """The variables for each value; those set must agree with each other and with the flag of that name."""

    nodes: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    nproc: tuple[str, ...] = ()
    host: tuple[str, ...] = ("MASTER_ADDR",)
    port: tuple[str, ...] = ("MASTER_PORT",)


@dataclass(frozen=True)
class PlatformEnv:
    """The input of a platform's reader: variables, the host name, and flags (as text, by column).

    `marks` are the variables that identify the platform, for messages. A reader first calls
    `for_platform(...)`. `spares` are part of the number of nodes.
    """

    environ: Mapping[str, str]
    hostname: str
    flags: Mapping[str, str]
    elastic: tuple[int, int] | None
    platform: str = "none"
    marks: tuple[str, ...] = ()
    variable_names: VariableNames = VariableNames(host=(), port=())
    spares: int = 0

    def for_platform(
        self, platform: str, marks: tuple[str, ...], variable_names: VariableNames
    ) -> "PlatformEnv":
        """Return the same env with this platform's names."""
        return replace(self, platform=platform, marks=marks, variable_names=variable_names)

    @property
    def nodes_flag(self) -> str:
        """The flag for the number of nodes, as messages name it."""
        return "--nodes plus --spares" if self.spares else "--nodes"

    def sources(self, column: str) -> dict[str, str]:
        """Return the flags and variables that set this column, with their text.

        Empty variables are left out.
        """
        names: tuple[str, ...] = getattr(self.variable_names, column)
        found = {name: value for name in names if (value := self.environ.get(name))}
        flag = "--master" if column in ("host", "port") else "--" + column.replace("_", "-")
        if column == "nodes":
            flag = self.nodes_flag
        # The flag comes first, so that error messages start with what the user typed.
        return {flag: self.flags[column], **found} if column in self.flags else found

    def text(self, column: str) -> str | None:
        """Return the value that all sources of a column agree on, or None if there is none.

        Raises ConfigError if they contradict each other.
        """
        sources = self.sources(column)
        if len(set(sources.values())) > 1:
            raise ConfigError(
                f"{assignments(sources)} contradict each other; expected equal values{self._where}"
            )
        return next(iter(sources.values()), None)

    def number(self, column: str, default: int | None = None) -> int:
        """Return a column as an integer, or `default`.

        Raises ConfigError if there is neither.
        """
        value = self.text(column)
        if value is None:
            if default is None:
                raise self.missing(column)
            return default
        return parse_integer(next(iter(self.sources(column))), value)

    def variable(self, name: str) -> int:
        value = self.environ.get(name)
        if not value:
            raise ConfigError(f"{self.seen()} but {name} is not; {self._advice}")
        return parse_integer(name, value)

    @property
    def _where(self) -> str:
        """The platform's name, as the end of a message; "" without a platform."""
        return "" if self.platform in NAMELESS else f" ({self.platform})"

    @property
    def _advice(self) -> str:
        """Advice for a missing variable."""
        if self.platform not in NAMELESS:
            return f"{self.platform} needs it"
        found = " ".join(name for name in self.marks if self.environ.get(name))
        return f"start ranks with torchrun, which sets both, or type `unset {found}`"

    def host(self) -> str:
        host = self.text("host")
        if host is None:
            raise self.missing("host")
        return host

    def nproc(self) -> int | None:
        """Return the number of processes per node, or None for auto.

        A platform's `auto` is a default, so a flag may override it. Raises ConfigError for contradictions.
        """
        # "auto" and "gpu" are values of torchrun, which PET_NPROC_PER_NODE may contain.
        sources = {
            name: value for name, value in self.sources("nproc").items() if value not in ("auto", "gpu")
        }
        numbers = {name: parse_integer(name, value, 1, "auto or ") for name, value in sources.items()}
        if len(set(numbers.values())) > 1:
            raise ConfigError(f"{assignments(sources)} contradict each other; set one of them to auto")
        return next(iter(numbers.values()), None)

    def missing(self, column: str) -> ConfigError:
        names: tuple[str, ...] = getattr(self.variable_names, column)
        flag = {"host": "--master HOST:PORT", "port": "--master HOST:PORT"}.get(
            column, "--" + column.replace("_", "-")
        )
        return ConfigError(
            f"{self.seen()} but {' and '.join(names) or flag} is not{self._where}; set it or give {flag}"
        )

    def seen(self) -> str:
        """Return the variables and flags that identified this platform, as the start of a message."""
        marks = {name: value for name in self.marks if (value := self.environ.get(name))}
        flags = [
            flag for flag, on in (("--master", "host"), ("--node-rank", "node_rank")) if on in self.flags
        ]
        given = ", ".join([assignments(marks)] * bool(marks) + flags)
        return f"{given} {'is' if len(marks) + len(flags) == 1 else 'are'} set"


def assignments(sources: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sources.items())


def parse_integer(name: str, value: str, minimum: int = 0, also: str = "") -> int:
    # int() alone would also accept 1_000, spaces, signs and the digits of other scripts.
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < minimum:
        raise ConfigError(f"{name}: invalid value {value!r}; expected {also}an integer >= {minimum}")
    return int(value)


def value_range(name: str, value: str) -> tuple[int, int]:
    low, _, high = value.partition(":")
    bounds = (parse_integer(name, low, 1, "MIN:MAX or "), parse_integer(name, high or low, 1, "MIN:MAX or "))
    if bounds[0] > bounds[1]:
        raise ConfigError(f"{name}: invalid value {value!r}; expected MIN:MAX with MIN <= MAX, such as 1:2")
    return bounds


def split_address(name: str, value: str) -> tuple[str, str]:
    host, _, port = value.rpartition(":")
    # IPv6 addresses need brackets, as in URLs.
    if not host.strip("[]") or not port or (":" in host and not host.startswith("[")):
        raise ConfigError(
            f"{name}: invalid value {value!r}; expected HOST:PORT, such as {name} node1:{DEFAULT_PORT}"
        )
    return host.strip("[]"), port


def loopback_name(index: int) -> str:
    return f"127.0.0.{101 + index}"


def any_set(environ: Mapping[str, str], names: tuple[str, ...]) -> bool:
    """Return whether one of these variables is set to a nonempty value."""
    return any(environ.get(name) for name in names)


def pod_name(hostname: str, master: str) -> str:
    """Return the pod's name, with the master's domain if both belong to one set.

    Short names do not resolve there.
    """
    pod, (first, _, domain) = hostname.split(".")[0], master.partition(".")
    # Pods of one set differ only in the indices at the end of their names.
    same_set = re.sub(r"(-[0-9]+)+$", "", pod) == re.sub(r"(-[0-9]+)+$", "", first)
    return f"{pod}.{domain}" if domain and same_set else pod
