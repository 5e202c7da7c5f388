"""On one machine nothing that a run opens can be reached from the network."""

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import Runs

from program_files import program_text

pytestmark = pytest.mark.timeout(600)
LIMIT = 250.0
LISTENS, UNCONNECTED = "0A", "07"  # proc(5): a TCP socket that listens, a UDP socket that anyone may send to

SCRIPT = program_text("listening_script")


def tree(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from tree(int(child))


def open_to(pid: int) -> set[str]:
    """Addresses that a process tree can be reached at, as "tcp 0.0.0.0:29500 (process name)"."""
    owners = {}
    for each in tree(pid):
        for descriptor in Path(f"/proc/{each}/fd").iterdir():
            try:
                owners[os.readlink(descriptor)] = Path(f"/proc/{each}/comm").read_text().strip()
            except OSError:  # closed meanwhile
                continue
    found = set()
    for name, state in {"tcp": LISTENS, "tcp6": LISTENS, "udp": UNCONNECTED, "udp6": UNCONNECTED}.items():
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            owner = owners.get(f"socket:[{words[9]}]")
            if words[3] == state and owner is not None:
                address, port = words[1].split(":")
                found.add(f"{name} {_readable(address)} {int(port, 16)} {owner}")
    return found


def _readable(text: str) -> str:
    """The kernel's hexadecimal words, each in the byte order of the host."""
    raw = b"".join(struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
    return str(ipaddress.ip_address(raw))


def beyond_loopback(addresses: set[str]) -> list[str]:
    return [each for each in sorted(addresses) if not ipaddress.ip_address(each.split()[1]).is_loopback]


def test_what_is_open_to_all_is_seen() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server, socket.create_server(("127.0.0.1", 0)):
        port = server.getsockname()[1]
        (seen,) = beyond_loopback(open_to(os.getpid()))
        assert seen.startswith(f"tcp 0.0.0.0 {port} ")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--nodes", 2), id="simulated nodes"),
        pytest.param(("--nproc", 2), id="one node", marks=pytest.mark.soak),
    ],
)
def test_a_launch_on_one_machine_listens_on_loopback_alone(runs: Runs, flags: tuple[Any, ...]) -> None:
    launch = runs.start(
        "launch", "run", *flags, "--steps", 100_000, "--checkpoint-every", 20, "--shutdown-timeout", 200,
        delay=0.02,
    )  # fmt: skip
    runs.wait_for_step("run", 20)
    addresses = open_to(launch.pid)
    assert len(addresses) >= 3, f"a page, a store, and gloo's: {addresses}"
    assert beyond_loopback(addresses) == []
    launch.terminate()
    code, output = runs.processes.wait(launch, LIMIT)
    assert code == 143, output


def test_ranks_of_a_script_listen_on_loopback_alone(runs: Runs) -> None:
    (runs.folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "tandem", "launch", "--nodes", "2", "--metrics", "0", "script.py"]
    launch = runs.processes.start(command, cwd=runs.folder, env=runs.environment)
    runs.until((runs.folder / "trains").exists, "step of the script", LIMIT)
    addresses = open_to(launch.pid)
    assert len(addresses) >= 4, f"a page, two stores, and gloo's: {addresses}"
    assert beyond_loopback(addresses) == []
    launch.terminate()
    runs.processes.wait(launch, LIMIT)


@pytest.mark.soak
def test_ranks_by_hand_on_one_machine_listen_on_loopback_alone(runs: Runs, free_port: int) -> None:
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port)}
    command = runs.command("train", "run", "--steps", 100_000, "--checkpoint-every", 20, delay=0.02)
    ranks = []
    for rank in "01":
        own = {**runs.environment, **group, "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(runs.processes.start(command, cwd=runs.folder, env=own))
    runs.wait_for_step("run", 20)
    addresses = open_to(ranks[0].pid) | open_to(ranks[1].pid)
    assert len(addresses) >= 3, addresses
    assert beyond_loopback(addresses) == []
    for rank in ranks:
        rank.terminate()
    assert {runs.processes.wait(rank, LIMIT)[0] for rank in ranks} == {143}
