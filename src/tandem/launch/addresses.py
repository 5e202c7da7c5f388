"""Addresses of a host, and which of them are this machine's. No torch: command lines are read with it."""

import socket
from contextlib import suppress


def addresses_of(host: str) -> list[str]:
    """The IP addresses of `host`; empty if the name does not resolve."""
    with suppress(OSError, UnicodeError):
        return sorted({str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    return []


def is_local(address: str) -> bool:
    """Whether this machine has the IP `address`, that is, can bind to it."""
    with socket.socket(family_of(address)) as probe, suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def family_of(address: str) -> socket.AddressFamily:
    """IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
