"""What keeps nodes from meeting, as one of them can see it: names, the port, interfaces, clocks, WORLD_SIZE.

`tandem doctor` makes these checks, and so does an agent that has waited for the others in vain.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tandem.launch.guard import is_gate
from tandem.launch.rendezvous_state import STATE_KEY, from_text
from tandem.platforms.placement import Placement
from tandem.timeouts import (
    CLOCK_LOOK_SECONDS,
    CLOCK_SKEW_SECONDS,
    MASTER_ANSWER_SECONDS,
    RENDEZVOUS_POLL_SECONDS,
)

NETWORKS = Path("/sys/class/net")
IS_UP = 1  # IFF_UP of netdevice(7)
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
FIRST_TIME = 1_700_000_000  # 2023: a clock that is behind it was never set

Environment = Mapping[str, str]
Connect = Callable[[], TCPStore]


class Finding(NamedTuple):
    """What one check has found, and what a person can do about it."""

    name: str
    state: Literal["pass", "warn", "fail"]
    said: str
    remedy: str = ""


def what_is_wrong(
    placement: Placement, environ: Environment, connect: Connect | None = None
) -> dict[str, str]:
    """{name: what, and what to do} for nodes that did not meet; node 0 holds its port itself.

    `connect` gives the store to a node that was let in there.
    """
    found = [*names(placement, environ), *interfaces(environ), *others(placement, True, connect)]
    return {each.name: f"{each.said}; {each.remedy}" for each in found if each.state != "pass"}


def others(placement: Placement, waited: bool = False, connect: Connect | None = None) -> Iterator[Finding]:
    """The port where nodes meet, and what the store there says, which a gate shows to nobody but its nodes.

    `waited`: an agent asks that has waited for the others; on node 0 it is the one that holds the port.
    """
    addresses, skews = _addresses(placement.master_host), dict[str, float]()
    if addresses and placement.node_rank == 0 and not waited:
        yield _free(placement, addresses[0])
    elif addresses:
        yield (reached := _reached(placement))
        here = set[int]()
        if reached.state == "pass" and (connect or not is_gate(_master(placement))):
            here, skews = _told(placement, connect or partial(_store, placement))
        missing = [str(node) for node in range(placement.nodes) if node not in here]
        if waited and here and missing and placement.elastic is None:
            said = f"node {', '.join(missing)} did not come"
            yield Finding("nodes", "fail", said, "look at its log, and start it")
    yield clock(skews)


def names(placement: Placement, environ: Environment) -> Iterator[Finding]:
    """Whether the master's name and this host's own are known here."""
    host = placement.master_host
    found = _addresses(host)
    name = "MASTER_ADDR"
    if not found:
        remedy = "correct it (--master HOST:PORT); on Kubernetes: is node 0's headless service there?"
        yield Finding(name, "fail", f"{host} does not resolve here", remedy)
    elif placement.node_rank == 0 and not any(map(_is_here, found)):
        said = f"{host} is {', '.join(found)}, and no address of this host, which is node 0"
        yield Finding(name, "warn", said, "give node 0's own name, unless addresses are translated")
    else:
        yield Finding(name, "pass", f"{host} is {', '.join(found)}")
    if placement.is_one_host or any(environ.get(each) for each in INTERFACES):
        return
    own = socket.gethostname()
    mine = _addresses(own)
    if all(each.startswith("127.") or each == "::1" for each in mine):
        known = f"is {', '.join(mine)} here, where no other node can reach it" if mine else "does not resolve"
        remedy = f"give {own} its address in /etc/hosts, or name the interface in GLOO_SOCKET_IFNAME"
        yield Finding("own name", "fail", f"{own} {known}", remedy)
    else:
        yield Finding("own name", "pass", f"{own} is {', '.join(mine)}")


def interfaces(environ: Environment, networks: Path = NETWORKS) -> Iterator[Finding]:
    """Whether what gloo and NCCL are told to use is there, and up; NCCL takes prefixes, =NAME and ^NAME."""
    there = {path.name: _is_up(path) for path in networks.iterdir()} if networks.is_dir() else {}
    wrong, said = "", []
    for variable in INTERFACES:
        text = environ.get(variable, "")
        for word in text.removeprefix("^").removeprefix("=").split(",") if text else ():
            is_exact = variable != "NCCL_SOCKET_IFNAME" or text.startswith("=")
            fits = [up for name, up in there.items() if (name if is_exact else name[: len(word)]) == word]
            said.append(f"{variable}={text}")
            if there and not text.startswith("^") and not any(fits):
                wrong = f"{variable}={text}: {word} {'is down' if fits else 'is not there'}"
    up = ", ".join(sorted(name for name, is_up in there.items() if is_up)) or "none"
    if wrong:
        yield Finding("interface", "fail", f"{wrong}; up here: {up}", "name one of these, or leave it out")
    else:
        yield Finding("interface", "pass", f"{', '.join(said) or 'none is asked for'}; up here: {up}")


def world_size(environ: Environment, placement: Placement | None, nproc: int) -> Finding | None:
    """Where WORLD_SIZE counts pods (a PyTorchJob whose nprocPerNode is no number) and ranks are more.

    `placement` is None where it contradicts the rest; None where it has nothing to do with pods.
    """
    stated, pods = environ.get("WORLD_SIZE", ""), environ.get("PET_NNODES", "")
    each = environ.get("PET_NPROC_PER_NODE", "")
    ranks = int(each) if each.isdigit() else nproc
    if not stated or stated != pods or ranks < 2:
        return None if placement is None else Finding("WORLD_SIZE", "pass", stated or "is not set")
    said = f"WORLD_SIZE={stated} counts pods: {pods} pods of {ranks} are {int(pods) * ranks} ranks"
    remedy = f"set nprocPerNode: {ranks} in the PyTorchJob, as text, and leave WORLD_SIZE to the operator"
    return Finding("WORLD_SIZE", "warn" if placement is not None else "fail", said, remedy)


def clock(skews: Mapping[str, float]) -> Finding:
    """`skews`: seconds that this node is ahead of others, by name."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(RENDEZVOUS_POLL_SECONDS)
    stepped = (time.time() - wall) - (time.monotonic() - steady)
    remedy = "synchronise it (chrony, systemd-timesyncd), on the host where this is a container"
    far = {name: skew for name, skew in skews.items() if abs(skew) > CLOCK_SKEW_SECONDS}
    if wall < FIRST_TIME:
        return Finding("clock", "fail", f"it shows {datetime.fromtimestamp(wall, UTC):%Y-%m-%d}", remedy)
    if abs(stepped) > CLOCK_SKEW_SECONDS:
        return Finding("clock", "warn", f"it has just been set by {stepped:+.0f} s", remedy)
    if far:
        side = {True: "ahead of", False: "behind"}
        differs = [f"{abs(by):.0f} s {side[by > 0]} {node}'s" for node, by in far.items()]
        return Finding("clock", "warn", ", ".join(differs), remedy)
    said = f"agrees with {', '.join(skews)}" if skews else "nobody to compare it with"
    return Finding("clock", "pass", said)


def _addresses(host: str) -> list[str]:
    with suppress(OSError, UnicodeError):
        return sorted({str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    return []


def _is_here(address: str) -> bool:
    with socket.socket(_family(address)) as probe, suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_up(path: Path) -> bool:
    with suppress(OSError, ValueError):
        return bool(int((path / "flags").read_text(), 16) & IS_UP)
    return False


def _free(placement: Placement, address: str) -> Finding:
    """Whether node 0 could listen where the others look for it."""
    port = placement.master_port
    with socket.socket(_family(address)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address if placement.is_one_host else "", port))
            probe.listen()
        except OSError as error:
            said = f"cannot listen at port {port}: {os.strerror(error.errno or 0)}"
            remedy = f"`ss -ltnp sport = :{port}` says who does; unless it is this job, choose another port"
            return Finding("MASTER_PORT", "fail", said, remedy)
    return Finding("MASTER_PORT", "pass", f"{port} is free" if port else "any free one")


def _reached(placement: Placement) -> Finding:
    where = f"{placement.master_host}:{placement.master_port}"
    try:
        socket.create_connection(_master(placement), timeout=MASTER_ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        said, remedy = f"nobody listens at {where}", "start node 0; if it runs, its port is another one"
        return Finding("MASTER_PORT", "warn", said, remedy)
    except OSError as error:
        said = f"{where} cannot be reached: {error.strerror or error}"
        remedy = "let it through: firewall, security group, NetworkPolicy; or is the address an old one?"
        return Finding("MASTER_PORT", "fail", said, remedy)
    return Finding("MASTER_PORT", "pass", f"{where} answers")


def _master(placement: Placement) -> tuple[str, int]:
    return placement.master_host, placement.master_port


def _store(placement: Placement) -> TCPStore:
    timeout = timedelta(seconds=MASTER_ANSWER_SECONDS)
    return TCPStore(*_master(placement), is_master=False, timeout=timeout)


def _told(placement: Placement, connect: Connect) -> tuple[set[int], dict[str, float]]:
    """Which nodes are in the store, and how far this clock is ahead of theirs: each writes its time there
    once a second while it lives.
    """
    here = {placement.node_rank}
    skews: dict[str, float] = {}
    before: dict[str, datetime] = {}
    deadline = time.monotonic() + CLOCK_LOOK_SECONDS
    with suppress(RuntimeError, ValueError):
        store = connect()
        while time.monotonic() < deadline and store.check([STATE_KEY]):
            state = from_text(store.get(STATE_KEY))
            for node, beat in state.last_heartbeats.items():
                if not (number := re.match(r"[0-9]{6}(?=\.)", node.addr)):
                    continue
                here.add(rank := int(number[0]))
                if before.get(node.addr, beat) != beat and rank != placement.node_rank:
                    skew = time.time() - beat.timestamp()
                    skews[f"node {rank}"] = min(skew, skews.get(f"node {rank}", skew), key=abs)
                before[node.addr] = beat
            time.sleep(RENDEZVOUS_POLL_SECONDS)
    return here, skews
