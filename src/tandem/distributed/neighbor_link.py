"""The connection through which a rank sends copies of its snapshots to a rank of the next node.

Both ends are threads of their ranks. Nothing here is a collective, so no rank waits for a slow copy. The
sender pauses after each piece, which limits the share of the network and of the cores that copies take.
"""

import fcntl
import hmac
import logging
import mmap
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from tandem.checkpoint.node_memory import NodeMemory
from tandem.checkpoint.slot_copies import HEAD, IncomingSlot, SlotHead
from tandem.timeouts import COPY_CONNECT_SECONDS, COPY_RETRY_SECONDS

log = logging.getLogger("tandem.run")

PIECE_BYTES = 2**20
LINK_SHARE = 0.1
"""Share of the time in which a node's copies may occupy its link, which the step's own traffic needs."""
CPU_SHARE = {"cpu": 0.01, "cuda": 0.1}
"""Share of a core that sending may take. Receiving takes as much, and with "cpu" the steps need the cores."""
TOKEN_BYTES = 32
WHOLE, DROPPED = b"w", b"d"
KEPT, NO_ROOM = b"k", b"n"
SIOCGIFADDR = 0x8915
"""The ioctl for the IPv4 address of an interface, netdevice(7)."""


class Address(NamedTuple):
    """Where a rank receives copies, and the token that a sender must send first."""

    host: str
    port: int
    token: str


def own_address(interface: str, store: str | None) -> str:
    """Return an address of this host that other nodes can reach.

    `interface`: its name, as in GLOO_SOCKET_IFNAME. Otherwise it is the address of the host's own name, as
    for gloo, or that from which `store` is reached. Raises OSError.
    """
    for name in interface.split(","):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", name.strip().removeprefix("=").encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
    with suppress(OSError):
        for family, _, _, _, where in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            if not str(where[0]).startswith("127.") and where[0] != "::1":
                with suppress(OSError), socket.socket(family) as probe:
                    probe.bind(where)
                    return str(where[0])
    family, _, _, _, where = socket.getaddrinfo(store or "localhost", 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # sends nothing
        return str(probe.getsockname()[0])


def receive_into(connection: socket.socket, memory: memoryview) -> None:
    """Receive until `memory` is full. Raises ConnectionError if the other end closes before."""
    while memory:
        # One call per piece: each return to Python would compete for its lock with the training thread.
        received = connection.recv_into(memory, min(len(memory), PIECE_BYTES), socket.MSG_WAITALL)
        if not received:
            raise ConnectionError("closed by the other end")
        memory = memory[received:]


def receive(connection: socket.socket, length: int) -> bytes:
    found = bytearray(length)
    receive_into(connection, memoryview(found))
    return bytes(found)


def _watch(connection: socket.socket) -> None:
    """Detect within 30 s a host that has stopped answering, and send small messages at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class CopyReceiver:
    """Receives copies into a region, alternating between two slots; `kept` is the slot to keep at first."""

    def __init__(self, region: NodeMemory, kept: int | None, host: str) -> None:
        self._region = region
        self._last = 1 if kept is None else kept
        self._mapped: mmap.mmap | None = None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._connection: socket.socket | None = None
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_hex(TOKEN_BYTES // 2))
        threading.Thread(target=self._run, name="tandem-copies-in", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connection = connection
            with connection, suppress(OSError):
                connection.settimeout(COPY_CONNECT_SECONDS)
                if hmac.compare_digest(receive(connection, TOKEN_BYTES), self.address.token.encode()):
                    connection.settimeout(None)
                    _watch(connection)
                    while True:
                        self._receive(connection)

    def _receive(self, connection: socket.socket) -> None:
        head = SlotHead(*HEAD.unpack(receive(connection, HEAD.size)))
        try:
            slot = IncomingSlot(self._region, 1 - self._last, head, self._mapped)
        except (OSError, ValueError, OverflowError) as error:
            connection.sendall(NO_ROOM)
            raise ConnectionError from error
        self._mapped = slot.memory
        connection.sendall(KEPT)
        receive_into(connection, slot.contents)
        if receive(connection, 1) == WHOLE:
            slot.finish()
            self._last = 1 - self._last
        connection.sendall(KEPT)

    def close(self) -> None:
        """End the thread; a copy that it is receiving does not count."""
        for each in (self._listener, self._connection):
            with suppress(OSError):
                if each is not None:
                    each.shutdown(socket.SHUT_RDWR)  # close() would not wake up a thread that waits for it
        self._listener.close()


class OutgoingCopy(NamedTuple):
    """A slot to send; `is_whole` returns False once the slot has been overwritten."""

    head: SlotHead
    contents: memoryview
    is_whole: Callable[[], bool]


class CopySender:
    """Sends one slot at a time to the `CopyReceiver` of another rank.

    `device`: "cpu" or "cuda". `ranks`: how many ranks of this node send.
    """

    def __init__(self, address: Address, device: str, ranks: int = 1) -> None:
        self._address = address
        self._link_share = LINK_SHARE / ranks
        self._cpu_share = CPU_SHARE[device]
        self._jobs: queue.SimpleQueue[OutgoingCopy | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._connection: socket.socket | None = None
        self.is_busy = False
        """Whether the neighbor does not have the whole copy yet, or the sender still pauses after it."""
        self._ended = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="tandem-copies-out", daemon=True)

    def open(self) -> None:
        """Connect, and start the thread. Raises OSError."""
        self._connect()
        self._thread.start()

    def send(self, copy: OutgoingCopy) -> None:
        """Begin to send a slot, unless the sender is busy."""
        if not self.is_busy:
            self.is_busy = True
            self._jobs.put(copy)

    @property
    def busy_until(self) -> float:
        """When the last copy was complete, by time.monotonic(); now if it is not."""
        return time.monotonic() if self.is_busy else self._ended

    def veto(self) -> None:
        """Appear busy from now on, so that no rank begins a copy."""
        self.is_busy = True

    def close(self) -> None:
        """End the thread, and a copy that it is sending."""
        self._closing.set()
        self._jobs.put(None)
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _connect(self) -> socket.socket:
        if self._connection is None:
            host, port, token = self._address
            connection = socket.create_connection((host, port), COPY_CONNECT_SECONDS)
            connection.settimeout(None)
            _watch(connection)
            connection.sendall(token.encode())
            self._connection = connection
        return self._connection

    def _run(self) -> None:
        while (copy := self._jobs.get()) is not None and not self._closing.is_set():
            has_room = self._delivers(copy)
            if not has_room:
                return
            self._ended = time.monotonic()
            self.is_busy = False

    def _delivers(self, copy: OutgoingCopy) -> bool:
        """Send a slot until it has arrived; return False if the other node has no memory for it."""
        while not self._closing.is_set():
            try:
                connection = self._connect()
                connection.sendall(HEAD.pack(*copy.head))
                if receive(connection, 1) == NO_ROOM:
                    log.warning("no node keeps copies of its neighbor's shards: one has too little memory")
                    return False
                self._send_contents(connection, copy)
                return True
            except OSError:
                # Either the other rank has ended, and this one will, too, or the link is down for a while.
                self._disconnect()
                self._closing.wait(COPY_RETRY_SECONDS)
        return True

    def _send_contents(self, connection: socket.socket, copy: OutgoingCopy) -> None:
        for begin in range(0, len(copy.contents), PIECE_BYTES):
            began = time.monotonic()
            used = time.thread_time()
            piece = copy.contents[begin : begin + PIECE_BYTES]
            connection.sendall(piece)
            is_last = begin + PIECE_BYTES >= len(copy.contents)
            if is_last:
                # A slot that was overwritten meanwhile may be torn.
                connection.sendall(WHOLE if copy.is_whole() else DROPPED)
                receive(connection, 1)
            self._rest(time.monotonic() - began, time.thread_time() - used, len(piece))

    def _rest(self, took: float, used: float, size: int) -> None:
        """Pause after sending `size` bytes in `took` seconds, of which `used` were processor time."""
        pause = used / self._cpu_share - took
        # The time of a small piece is mostly that of the threads, and says nothing about the link.
        if size == PIECE_BYTES:
            pause = max(pause, took / self._link_share - took)
        if pause > 0:
            self._closing.wait(pause)

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(OSError):
                self._connection.close()
        self._connection = None
