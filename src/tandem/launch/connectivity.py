"""Find out why nodes cannot connect: names, the port, interfaces, clocks, WORLD_SIZE.

`tandem doctor` runs these checks, and so does an agent whose wait for the other nodes timed out.
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

from tandem.distributed.group_store import connect_store
from tandem.errors import PeerLostError
from tandem.launch.rendezvous_state import STATE_KEY, from_text
from tandem.launch.this_machine import addresses_of, family_of, is_local
from tandem.launch.tls_proxy import is_proxy
from tandem.platforms.detection import Placement
from tandem.timeouts import (
    CLOCK_LOOK_SECONDS,
    CLOCK_SKEW_SECONDS,
    MASTER_ANSWER_SECONDS,
    RENDEZVOUS_POLL_SECONDS,
)

NETWORKS = Path("/sys/class/net")
IS_UP = 1  # IFF_UP of netdevice(7)
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
FIRST_TIME = 1_700_000_000  # 2023; a clock before that was never set

Environment = Mapping[str, str]
Connect = Callable[[], TCPStore]


class ConnectivityProblem(NamedTuple):
    """The result of one check, and the remedy if it failed."""

    name: str
    state: Literal["pass", "warn", "fail"]
    text: str
    remedy: str = ""


def find_problems(
    placement: Placement, environ: Environment, connect: Connect | None = None
) -> dict[str, str]:
    """Return {check: problem and remedy} after nodes failed to connect.

    Node 0's port is expected to be in use. `connect` opens the store, if this node was admitted there.
    """
    found = [*names(placement, environ), *interfaces(environ), *others(placement, True, connect)]
    return {each.name: f"{each.text}; {each.remedy}" for each in found if each.state != "pass"}


def others(
    placement: Placement, waited: bool = False, connect: Connect | None = None
) -> Iterator[ConnectivityProblem]:
    """Check the port where nodes connect, and which nodes have joined the store there.

    A TLS proxy in front of the store admits only nodes of the job, so other callers check just the port.
    `waited`: the caller is an agent that has waited for the others; on node 0, it has the port open.
    """
    addresses = addresses_of(placement.master_host)
    skews = dict[str, float]()
    if addresses and placement.node_rank == 0 and not waited:
        yield _free(placement, addresses[0])
    elif addresses:
        reached = _reached(placement)
        here = set[int]()
        if reached.state == "pass" and (connect or not is_proxy(placement.master)):
            try:
                here, skews = _nodes_and_skews(placement, connect or partial(_store, placement))
            except PeerLostError as error:
                remedy = "run `ss -ltnp` on that host to see which program it is"
                reached = ConnectivityProblem("MASTER_PORT", "fail", str(error), remedy)
        yield reached
        missing = [str(node) for node in range(placement.nodes) if node not in here]
        if waited and here and missing and placement.elastic is None:
            text = f"node {', '.join(missing)} did not join"
            yield ConnectivityProblem("nodes", "fail", text, "check its log and start it")
    yield clock(skews)


def names(placement: Placement, environ: Environment) -> Iterator[ConnectivityProblem]:
    """Check that the master's name and this host's own name resolve here."""
    host = placement.master_host
    found = addresses_of(host)
    name = "MASTER_ADDR"
    if not found:
        remedy = "correct --master HOST:PORT; on Kubernetes, check that node 0's headless service exists"
        yield ConnectivityProblem(name, "fail", f"{host} does not resolve here", remedy)
    elif placement.node_rank == 0 and not any(map(is_local, found)):
        text = f"{host} is {', '.join(found)}, which is not an address of this host (node 0)"
        yield ConnectivityProblem(name, "warn", text, "use node 0's own name, unless this is NAT")
    else:
        yield ConnectivityProblem(name, "pass", f"{host} is {', '.join(found)}")
    # gloo uses the address of the host's own name, unless an interface is set.
    if placement.is_one_host or any(environ.get(each) for each in INTERFACES):
        return
    own = socket.gethostname()
    own_addresses = addresses_of(own)
    if all(each.startswith("127.") or each == "::1" for each in own_addresses):
        known = (
            f"is {', '.join(own_addresses)} here, which no other node can reach"
            if own_addresses
            else "does not resolve"
        )
        remedy = f"add {own} with its real address to /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface"
        yield ConnectivityProblem("own name", "fail", f"{own} {known}", remedy)
    else:
        yield ConnectivityProblem("own name", "pass", f"{own} is {', '.join(own_addresses)}")


def interfaces(environ: Environment, networks: Path = NETWORKS) -> Iterator[ConnectivityProblem]:
    """Check that the interfaces set for gloo and NCCL exist and are up.

    NCCL takes prefixes, =NAME (exact) and ^NAME (exclude).
    """
    there = {path.name: _is_up(path) for path in networks.iterdir()} if networks.is_dir() else {}
    wrong = ""
    requested = []
    for variable in INTERFACES:
        text = environ.get(variable, "")
        for word in text.removeprefix("^").removeprefix("=").split(",") if text else ():
            is_exact = variable != "NCCL_SOCKET_IFNAME" or text.startswith("=")
            fits = [up for name, up in there.items() if (name if is_exact else name[: len(word)]) == word]
            requested.append(f"{variable}={text}")
            if there and not text.startswith("^") and not any(fits):
                wrong = f"{variable}={text}: {word} {'is down' if fits else 'does not exist'}"
    up = ", ".join(sorted(name for name, is_up in there.items() if is_up)) or "none"
    if wrong:
        yield ConnectivityProblem(
            "interface", "fail", f"{wrong}; up here: {up}", "set it to one of these, or unset it"
        )
    else:
        yield ConnectivityProblem(
            "interface", "pass", f"{', '.join(requested) or 'none requested'}; up here: {up}"
        )


def world_size(environ: Environment, placement: Placement | None, nproc: int) -> ConnectivityProblem | None:
    """Check for a WORLD_SIZE that counts pods although there are more ranks.

    This happens in a PyTorchJob whose nprocPerNode is not a number. Pass None as `placement` if it could not
    be read. Returns None if WORLD_SIZE is not the problem.
    """
    stated = environ.get("WORLD_SIZE", "")
    pods = environ.get("PET_NNODES", "")
    each = environ.get("PET_NPROC_PER_NODE", "")
    ranks = int(each) if each.isdigit() else nproc
    if not stated or stated != pods or ranks < 2:
        return (
            None if placement is None else ConnectivityProblem("WORLD_SIZE", "pass", stated or "is not set")
        )
    message = f"WORLD_SIZE={stated} counts pods: {pods} pods of {ranks} ranks are {int(pods) * ranks} ranks"
    remedy = f"set nprocPerNode: {ranks} in the PyTorchJob, as a string, and leave WORLD_SIZE to the operator"
    return ConnectivityProblem("WORLD_SIZE", "warn" if placement is not None else "fail", message, remedy)


def clock(skews: Mapping[str, float]) -> ConnectivityProblem:
    """Check the clock; `skews` has the seconds by which this node is ahead of others, by name."""
    wall = time.time()
    steady = time.monotonic()
    time.sleep(RENDEZVOUS_POLL_SECONDS)
    stepped = (time.time() - wall) - (time.monotonic() - steady)
    remedy = "synchronize it (chrony, systemd-timesyncd); for a container, do that on the host"
    far = {name: skew for name, skew in skews.items() if abs(skew) > CLOCK_SKEW_SECONDS}
    if wall < FIRST_TIME:
        return ConnectivityProblem(
            "clock", "fail", f"it shows {datetime.fromtimestamp(wall, UTC):%Y-%m-%d}", remedy
        )
    if abs(stepped) > CLOCK_SKEW_SECONDS:
        return ConnectivityProblem("clock", "warn", f"it was just changed by {stepped:+.0f} s", remedy)
    if far:
        side = {True: "ahead of", False: "behind"}
        differs = [f"{abs(by):.0f} s {side[by > 0]} {node}'s" for node, by in far.items()]
        return ConnectivityProblem("clock", "warn", ", ".join(differs), remedy)
    message = f"agrees with {', '.join(skews)}" if skews else "no other node to compare it with"
    return ConnectivityProblem("clock", "pass", message)


def _is_up(path: Path) -> bool:
    with suppress(OSError, ValueError):
        return bool(int((path / "flags").read_text(), 16) & IS_UP)
    return False


def _free(placement: Placement, address: str) -> ConnectivityProblem:
    """Check whether node 0 could listen where the others look for it."""
    port = placement.master_port
    with socket.socket(family_of(address)) as probe:
        # The store does the same: connections of an earlier job in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address if placement.is_one_host else "", port))
            probe.listen()
        except OSError as error:
            problem = f"cannot listen on port {port}: {os.strerror(error.errno or 0)}"
            remedy = (
                f"run `ss -ltnp sport = :{port}` to see what does; unless it is this job, choose another port"
            )
            return ConnectivityProblem("MASTER_PORT", "fail", problem, remedy)
    return ConnectivityProblem("MASTER_PORT", "pass", f"{port} is free" if port else "any free port")


def _reached(placement: Placement) -> ConnectivityProblem:
    where = f"{placement.master_host}:{placement.master_port}"
    try:
        socket.create_connection(placement.master, timeout=MASTER_ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        problem = f"nothing listens at {where}"
        remedy = "start node 0; if it is running, it uses another port"
        return ConnectivityProblem("MASTER_PORT", "warn", problem, remedy)
    except OSError as error:
        problem = f"{where} cannot be reached: {error.strerror or error}"
        remedy = "check the firewall, security group and NetworkPolicy, and that the address is current"
        return ConnectivityProblem("MASTER_PORT", "fail", problem, remedy)
    return ConnectivityProblem("MASTER_PORT", "pass", f"{where} answers")


def _store(placement: Placement) -> TCPStore:
    timeout = timedelta(seconds=MASTER_ANSWER_SECONDS)
    return connect_store(*placement.master, timeout, MASTER_ANSWER_SECONDS)


def _nodes_and_skews(placement: Placement, connect: Connect) -> tuple[set[int], dict[str, float]]:
    """Return which nodes are in the store, and by how many seconds this clock is ahead of theirs.

    Each live node writes its time there once a second. Raises PeerLostError if no store answers.
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
                # Only a heartbeat that changes during this check is recent enough to compare.
                if before.get(node.addr, beat) != beat and rank != placement.node_rank:
                    skew = time.time() - beat.timestamp()
                    # The smallest difference counts, because delays of writing and reading increase the
                    # others.
                    skews[f"node {rank}"] = min(skew, skews.get(f"node {rank}", skew), key=abs)
                before[node.addr] = beat
            time.sleep(RENDEZVOUS_POLL_SECONDS)
    return here, skews
