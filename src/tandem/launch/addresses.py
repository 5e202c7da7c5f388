"""Resolve host names and recognize this machine's addresses.

Imports no torch, because the command line uses it before torch is imported.
"""

import socket
from contextlib import suppress


def addresses_of(host: str) -> list[str]:
    """Return the IP addresses of `host`, or an empty list if the name does not resolve."""
    with suppress(OSError, UnicodeError):
        return sorted({str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    return []


def is_local(address: str) -> bool:
    """Return whether this machine has the IP `address`, that is, whether it can bind to it."""
    with socket.socket(family_of(address)) as probe, suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def family_of(address: str) -> socket.AddressFamily:
    """Return the address family of an IP address: AF_INET or AF_INET6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
