"""Who is heard at the stores of node 0: nodes that have the job's secret, over TLS.

With a secret the stores listen on node 0's loopback alone. Other nodes' connections to them go through a gate
there, at the master's port, and a way to it on each node, at a port of that node's loopback:

    rank, agent -> way (127.0.0.1) -> TLS, proof of the secret -> gate (MASTER:PORT) -> store (127.0.0.1)

Keys come from an anonymous key exchange, and each side proves that it knows the secret and sees the same TLS
connection ("tls-unique", RFC 5929), with a number of each that was never used before. So whoever stands in
between, plays something back, or knows no secret, gets no further; there is nothing to fall back to. A gate
greets before all that, so that a node can tell it from a store: what is greeted proves nothing.
"""

import contextlib
import hmac
import logging
import secrets
import selectors
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from tandem.platforms.environment import LOOPBACK
from tandem.timeouts import HANDSHAKE_SECONDS, QUIET_SECONDS

log = logging.getLogger("tandem.agent")

CIPHERS = "AECDH-AES256-SHA:@SECLEVEL=0"  # what proves who it is comes after it
GREETING = b"tandem: a job with a secret\n"
NUMBER_BYTES, PROOF_BYTES, PORT_BYTES, CHUNK_BYTES = 32, 32, 2, 65536
NO_PROOF = bytes(PROOF_BYTES)
NO_GATE = "no node 0 with a secret answers there"
STRANGERS = 64
"""So many that have proved nothing may be connected at once; one more, and one has to go."""


class RefusedError(OSError):
    """The other side has not proved that it knows the secret."""


def _context(is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2  # the last with tls-unique
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    context.set_ciphers(CIPHERS)
    return context


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = connection.recv(count - len(found))
        if not more:
            raise RefusedError("the other side closed the connection")
        found += more
    return found


def _proof(key: bytes, role: bytes, connection: ssl.SSLSocket, *words: bytes) -> bytes:
    binding = connection.get_channel_binding("tls-unique")
    if not binding:
        raise RefusedError("the connection has no TLS channel binding")
    return hmac.digest(key, b"".join((role, bytes([len(binding)]), binding, *words)), "sha256")


def ask(plain: socket.socket, key: bytes, port: int) -> ssl.SSLSocket:
    """On another node: the connection as one to what listens at `port` on node 0. Raises OSError."""
    plain.settimeout(HANDSHAKE_SECONDS)
    if _exactly(plain, len(GREETING)) != GREETING:
        raise RefusedError(NO_GATE)
    connection = _context(False).wrap_socket(plain)
    with _closed_at_an_error(connection):
        theirs, mine = _exactly(connection, NUMBER_BYTES), secrets.token_bytes(NUMBER_BYTES)
        words = theirs, mine, port.to_bytes(PORT_BYTES)
        connection.sendall(mine + words[2] + _proof(key, b"node", connection, *words))
        proof = _exactly(connection, PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(key, b"node 0", connection, *words)):
            raise RefusedError("node 0 has a different secret")
        connection.settimeout(None)
    return connection


def answer(plain: socket.socket, key: bytes) -> tuple[ssl.SSLSocket, int]:
    """On node 0: the connection of another node, and the port that it is for. Raises OSError."""
    plain.settimeout(HANDSHAKE_SECONDS)
    plain.sendall(GREETING)
    connection = _context(True).wrap_socket(plain, server_side=True)
    with _closed_at_an_error(connection):
        mine = secrets.token_bytes(NUMBER_BYTES)
        connection.sendall(mine)
        theirs, wanted = _exactly(connection, NUMBER_BYTES), _exactly(connection, PORT_BYTES)
        words, proof = (mine, theirs, wanted), _exactly(connection, PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(key, b"node", connection, *words)):
            connection.sendall(NO_PROOF)
            raise RefusedError("a different secret")
        connection.sendall(_proof(key, b"node 0", connection, *words))
        connection.settimeout(None)
    return connection, int.from_bytes(wanted)


@contextlib.contextmanager
def _closed_at_an_error(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def is_gate(address: tuple[str, int]) -> bool:
    """Whether what listens there asks for a secret. A store says nothing, and ends what asks nothing."""
    with contextlib.suppress(OSError), socket.create_connection(address, HANDSHAKE_SECONDS) as plain:
        plain.shutdown(socket.SHUT_WR)
        return _exactly(plain, len(GREETING)) == GREETING
    return False


def carry(one: ssl.SSLSocket, other: socket.socket) -> None:
    """Bytes both ways, until a side has ended; both are closed then."""
    with one, other, selectors.DefaultSelector() as selector, contextlib.suppress(OSError):
        for each in (one, other):
            each.setblocking(True)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, QUIET_SECONDS)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(each, selectors.EVENT_READ)
        while True:
            ready = [one] if one.pending() else [key.fileobj for key, _ in selector.select()]
            for source, target in ((one, other), (other, one)):
                if source in ready:
                    data = source.recv(CHUNK_BYTES)
                    if not data:
                        return
                    target.sendall(data)


class _Door:
    """A port where each connection is served by a thread of its own."""

    def __init__(self, listener: socket.socket, serve: Callable[[socket.socket], None], name: str) -> None:
        self._listener, self._serve, self._name = listener, serve, name
        self.port = int(listener.getsockname()[1])
        threading.Thread(target=self._accept, name=name, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                threading.Event().wait(0.1)  # no descriptor is free
                continue
            try:
                threading.Thread(target=self._one, args=(connection,), name=self._name, daemon=True).start()
            except RuntimeError:  # no thread is free
                connection.close()

    def _one(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):  # ssl's, of a connection that is closed
            self._serve(connection)


class Gate:
    """On node 0: lets connections of nodes that know the secret through to stores on its loopback."""

    def __init__(self, port: int, key: bytes) -> None:
        """Listens at `port` on all interfaces. Raises OSError."""
        self._key, self._stores = key, dict[int, int]()
        self._strangers, self._lock = dict[socket.socket, str](), threading.Lock()
        self._has_said = False
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", port), family=family, backlog=256, dualstack_ipv6=both)
        self.port = _Door(listener, self._serve, "tandem-gate").port

    def open(self, name: int, port: int) -> None:
        """Who asks for `name` gets what listens at `port` on this host's loopback."""
        self._stores[name] = port

    def close(self, name: int) -> None:
        self._stores.pop(name, None)

    def _serve(self, plain: socket.socket) -> None:
        address = str(plain.getpeername()[0]).removeprefix("::ffff:")
        self._make_room(plain, address)
        copy = plain.dup()  # what TLS takes over; `plain` stays for whoever has to end it
        try:
            connection, name = answer(copy, self._key)
        except RefusedError as error:
            self._say_once(address, error)
            return
        finally:
            with self._lock:
                self._strangers.pop(plain, None)
            copy.close()  # nothing, where TLS has it
        with connection:
            port = self._stores.get(name)
            if port is not None:
                carry(connection, socket.create_connection((LOOPBACK, port), HANDSHAKE_SECONDS))

    def _make_room(self, plain: socket.socket, address: str) -> None:
        """One more stranger; where they are too many, the oldest of the address that most come from goes."""
        with self._lock:
            self._strangers[plain] = address
            if len(self._strangers) <= STRANGERS:
                return
            crowd = Counter(self._strangers.values()).most_common(1)[0][0]
            oldest = next(each for each, of in self._strangers.items() if of == crowd)
            del self._strangers[oldest]
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)

    def _say_once(self, address: str, error: RefusedError) -> None:
        if "secret" in str(error) and not self._has_said:
            self._has_said = True
            log.warning(
                "refused a connection from %s: it has %s; further ones are not logged", address, error
            )


class Way:
    """On another node: a port of its loopback that leads through node 0's gate to one store there.

    `name` is what the gate is asked for; what comes after a change of it goes there.
    """

    def __init__(self, master: tuple[str, int], key: bytes, name: int) -> None:
        self._master, self._key, self.name = master, key, name
        self.port = _Door(socket.create_server((LOOPBACK, 0), backlog=256), self._serve, "tandem-way").port

    def check(self) -> None:
        """Raises OSError, with why, where there is no gate of this job."""
        if not is_gate(self._master):
            raise RefusedError(NO_GATE)
        self._through().close()

    def _through(self) -> ssl.SSLSocket:
        there = socket.create_connection(self._master, HANDSHAKE_SECONDS)  # resolved anew each time
        try:
            return ask(there, self._key, self.name)
        except RefusedError:
            raise
        except OSError as error:
            raise RefusedError(f"{type(error).__name__} during the handshake") from error
        finally:
            there.close()  # nothing, where TLS has it

    def _serve(self, plain: socket.socket) -> None:
        carry(self._through(), plain)
