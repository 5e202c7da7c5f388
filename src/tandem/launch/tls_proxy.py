"""Run TLS proxies in front of node 0's stores, for jobs with a secret.

With a secret, the stores listen only on node 0's loopback. Connections from other nodes go through a proxy
server there (`ProxyServer`), at the master's port, and a proxy client (`ProxyClient`) on each node, at a port
of that node's loopback:

    rank, agent -> client (127.0.0.1) -> TLS, proof of the secret -> server (MASTER:PORT) -> store

The TLS keys come from an anonymous key exchange. Each side then proves that it knows the secret and sees the
same TLS connection ("tls-unique", RFC 5929), with a nonce from each side. A man in the middle, a replay, or a
peer without the secret therefore gets no further, and there is no fallback. The server sends a greeting
before TLS, so that a node can tell the server from a store; the greeting proves nothing. See
docs/architecture.md#with-a-secret.
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

# OpenSSL refuses anonymous ciphers at any security level above 0.
CIPHERS = "AECDH-AES256-SHA:@SECLEVEL=0"  # anonymous: authentication follows inside the connection
GREETING = b"tandem: a job with a secret\n"
NUMBER_BYTES = 32
PROOF_BYTES = 32
PORT_BYTES = 2
CHUNK_BYTES = 65536
NO_PROOF = bytes(PROOF_BYTES)
NO_PROXY_SERVER = "no node 0 with a secret answers there"
MAX_UNAUTHENTICATED = 64
"""Limit for unauthenticated connections that are open at once. One more closes one of them."""


class ProxyRefusedError(OSError):
    """The peer has not proved that it knows the secret."""


def _context(is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2  # TLS 1.3 has no tls-unique
    # A renegotiated or resumed session breaks the promise of tls-unique (triple handshake, RFC 7627).
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    context.set_ciphers(CIPHERS)
    return context


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = connection.recv(count - len(found))
        if not more:
            raise ProxyRefusedError("the other side closed the connection")
        found += more
    return found


def _proof(key: bytes, role: bytes, connection: ssl.SSLSocket, *words: bytes) -> bytes:
    binding = connection.get_channel_binding("tls-unique")
    if not binding:
        raise ProxyRefusedError("the connection has no TLS channel binding")
    # The role keeps a peer from sending a proof back to its author. The length keeps the joined parts
    # unambiguous.
    return hmac.digest(key, b"".join((role, bytes([len(binding)]), binding, *words)), "sha256")


def connect_as_node(plain: socket.socket, key: bytes, port: int) -> ssl.SSLSocket:
    """Authenticate as a node, and return the connection to what listens for `port` on node 0.

    Raises OSError (ProxyRefusedError if the secrets differ).
    """
    plain.settimeout(HANDSHAKE_SECONDS)
    if _exactly(plain, len(GREETING)) != GREETING:
        raise ProxyRefusedError(NO_PROXY_SERVER)
    connection = _context(False).wrap_socket(plain)
    with _closed_at_an_error(connection):
        theirs = _exactly(connection, NUMBER_BYTES)
        nonce = secrets.token_bytes(NUMBER_BYTES)
        words = theirs, nonce, port.to_bytes(PORT_BYTES)
        connection.sendall(nonce + words[2] + _proof(key, b"node", connection, *words))
        proof = _exactly(connection, PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(key, b"node 0", connection, *words)):
            raise ProxyRefusedError("node 0 has a different secret")
        connection.settimeout(None)
    return connection


def accept_node(plain: socket.socket, key: bytes) -> tuple[ssl.SSLSocket, int]:
    """Authenticate as node 0, and return a node's connection and the store that it asks for.

    Raises OSError (ProxyRefusedError if the secrets differ).
    """
    plain.settimeout(HANDSHAKE_SECONDS)
    plain.sendall(GREETING)
    connection = _context(True).wrap_socket(plain, server_side=True)
    with _closed_at_an_error(connection):
        nonce = secrets.token_bytes(NUMBER_BYTES)
        connection.sendall(nonce)
        theirs = _exactly(connection, NUMBER_BYTES)
        wanted = _exactly(connection, PORT_BYTES)
        words = (nonce, theirs, wanted)
        # The node proves itself first, so a stranger gets no digest to guess the secret offline.
        proof = _exactly(connection, PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(key, b"node", connection, *words)):
            # Send this before closing, so that the other side can report that the secrets differ.
            connection.sendall(NO_PROOF)
            raise ProxyRefusedError("a different secret")
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


def is_proxy(address: tuple[str, int]) -> bool:
    """Return whether a proxy server listens at `address`.

    A store sends nothing first, and closes a connection whose client has stopped sending.
    """
    with contextlib.suppress(OSError), socket.create_connection(address, HANDSHAKE_SECONDS) as plain:
        plain.shutdown(socket.SHUT_WR)
        return _exactly(plain, len(GREETING)) == GREETING
    return False


def _set_for_store(connection: socket.socket) -> None:
    """Set the socket options of a connection for the store's small requests and long waits."""
    # The timeouts were for connecting. A read of the store may wait much longer for a key.
    connection.setblocking(True)
    # A host that vanishes closes nothing, and this thread would wait for it forever.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, QUIET_SECONDS)
    # The store's requests are small and wait for answers, which Nagle's algorithm would delay.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def relay(one: ssl.SSLSocket, other: socket.socket) -> None:
    """Copy bytes both ways until one side closes, then close both."""
    with one, other, selectors.DefaultSelector() as selector, contextlib.suppress(OSError):
        for each in (one, other):
            _set_for_store(each)
            selector.register(each, selectors.EVENT_READ)
        while True:
            # TLS may have decrypted bytes buffered, for which select() does not wake up.
            ready = [one] if one.pending() else [key.fileobj for key, _ in selector.select()]
            for source, target in ((one, other), (other, one)):
                if source in ready:
                    data = source.recv(CHUNK_BYTES)
                    if not data:
                        return
                    target.sendall(data)


class _Listener:
    """Serve every connection to a port in a separate thread."""

    def __init__(self, listener: socket.socket, serve: Callable[[socket.socket], None], name: str) -> None:
        self._listener = listener
        self._serve = serve
        self._name = name
        self.port = int(listener.getsockname()[1])
        threading.Thread(target=self._accept, name=name, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                threading.Event().wait(0.1)  # out of file descriptors
                continue
            try:
                threading.Thread(target=self._one, args=(connection,), name=self._name, daemon=True).start()
            except RuntimeError:  # out of threads
                connection.close()

    def _one(self, connection: socket.socket) -> None:
        # Ssl raises ValueError for a closed connection.
        with connection, contextlib.suppress(OSError, ValueError):
            self._serve(connection)


class ProxyServer:
    """Proxy server on node 0: forwards authenticated nodes to stores on its loopback."""

    def __init__(self, port: int, key: bytes) -> None:
        """Listen at `port` on all interfaces. Raises OSError."""
        self._key = key
        self._stores = dict[int, int]()
        self._unauthenticated = dict[socket.socket, str]()
        self._lock = threading.Lock()
        self._has_said = False
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", port), family=family, backlog=256, dualstack_ipv6=both)
        self.port = _Listener(listener, self._serve, "tandem-proxy-server").port

    def open(self, name: int, port: int) -> None:
        """Forward nodes that ask for the store `name` to `port` on this host's loopback."""
        self._stores[name] = port

    def close(self, name: int) -> None:
        self._stores.pop(name, None)

    def _serve(self, plain: socket.socket) -> None:
        # A dual-stack socket shows IPv4 peers as mapped IPv6 addresses.
        address = str(plain.getpeername()[0]).removeprefix("::ffff:")
        self._make_room(plain, address)
        copy = plain.dup()  # TLS takes the copy over; `plain` stays open for `_make_room` to shut down
        try:
            connection, name = accept_node(copy, self._key)
        except ProxyRefusedError as error:
            self._say_once(address, error)
            return
        finally:
            with self._lock:
                self._unauthenticated.pop(plain, None)
            copy.close()  # does nothing once TLS has taken it over
        with connection:
            port = self._stores.get(name)
            if port is not None:
                relay(connection, socket.create_connection((LOOPBACK, port), HANDSHAKE_SECONDS))

    def _make_room(self, plain: socket.socket, address: str) -> None:
        """Count one more unauthenticated connection; if there are too many, shut one down.

        The oldest connection of the address with the most connections is closed, so that one attacker cannot
        crowd out the nodes.
        """
        with self._lock:
            self._unauthenticated[plain] = address
            if len(self._unauthenticated) <= MAX_UNAUTHENTICATED:
                return
            crowd = Counter(self._unauthenticated.values()).most_common(1)[0][0]
            oldest = next(each for each, of in self._unauthenticated.items() if of == crowd)
            del self._unauthenticated[oldest]
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)

    def _say_once(self, address: str, error: ProxyRefusedError) -> None:
        if "secret" in str(error) and not self._has_said:
            self._has_said = True
            log.warning(
                "refused a connection from %s: it has %s; further ones are not logged", address, error
            )


class ProxyClient:
    """Proxy client on another node: a loopback port that leads, through node 0's proxy, to one store there.

    `name` is the store that new connections ask for; existing ones keep theirs.
    """

    def __init__(self, master: tuple[str, int], key: bytes, name: int) -> None:
        self._master = master
        self._key = key
        self.name = name
        self.port = _Listener(
            socket.create_server((LOOPBACK, 0), backlog=256), self._serve, "tandem-proxy-client"
        ).port

    def check(self) -> None:
        """Raise OSError, with the reason, if no proxy server of this job answers."""
        if not is_proxy(self._master):
            raise ProxyRefusedError(NO_PROXY_SERVER)
        self._through().close()

    def _through(self) -> ssl.SSLSocket:
        # Resolved each time, because a new pod has a new address.
        there = socket.create_connection(self._master, HANDSHAKE_SECONDS)
        try:
            return connect_as_node(there, self._key, self.name)
        except ProxyRefusedError:
            raise
        except OSError as error:
            raise ProxyRefusedError(f"{type(error).__name__} during the handshake") from error
        finally:
            there.close()  # does nothing once TLS has taken it over

    def _serve(self, plain: socket.socket) -> None:
        relay(self._through(), plain)
