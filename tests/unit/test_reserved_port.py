"""The port that a launch has chosen is nobody else's until its store listens there."""

import socket
import struct
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from tandem.launch.node import with_port
from tandem.platforms.detection import detect

IP_LOCAL_PORT_RANGE = 51  # Linux 6.3: which ports a socket may be given


def given_from_range_of_one(port: int) -> int:
    """The port that the kernel gives to a socket that asks for any, when it can only give `port`."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as HTTP servers do
        try:
            other.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port << 16 | port))
        except OSError:
            pytest.skip("this kernel cannot narrow the range of ports")
        other.bind(("127.0.0.1", 0))
        return int(other.getsockname()[1])


def test_nobody_is_given_the_masters_port_and_the_store_listens_there() -> None:
    placement = with_port(detect({}, "host"))
    with pytest.raises(OSError, match="in use"):
        given_from_range_of_one(placement.master_port)
    store = TCPStore(
        placement.master_host, placement.master_port, is_master=True, wait_for_workers=False,
        timeout=timedelta(seconds=10),
    )  # fmt: skip
    store.set("here", "yes")
    assert store.get("here") == b"yes"
