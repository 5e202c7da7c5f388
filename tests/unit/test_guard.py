"""The gate of a job with a secret: who knows it is let through, and nobody else, whatever they send."""

import hmac
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from patience import patient
from tandem.errors import ConfigError
from tandem.launch import tls_proxy
from tandem.launch.secret import take_key
from tandem.launch.tls_proxy import (
    ProxyClient,
    ProxyRefusedError,
    ProxyServer,
    accept_node,
    connect_as_node,
    is_proxy,
)

KEY, OTHER = secrets.token_bytes(32), secrets.token_bytes(32)
NAME = 0


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


@pytest.fixture
def gate(store: TCPStore) -> ProxyServer:
    gate = ProxyServer(0, KEY)
    gate.open(NAME, store.port)
    return gate


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def client(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=patient(20)))


def both(
    asking: Callable[[], object], answering: Callable[[], object]
) -> tuple[list[BaseException], list[BaseException]]:
    """The errors of the two sides, each of which may wait for the other."""
    errors: tuple[list[BaseException], list[BaseException]] = ([], [])

    def run(side: int, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors[side].append(error)

    threads = [threading.Thread(target=run, args=each) for each in enumerate((asking, answering))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patient(30))
    return errors


def test_a_node_with_the_secret_uses_the_store_as_if_it_were_here(store: TCPStore, gate: ProxyServer) -> None:
    way = ProxyClient(("127.0.0.1", gate.port), KEY, NAME)
    way.check()
    clients = [client(way.port) for _ in range(5)]
    clients[0].set("a", "b" * 300_000)  # more than one TLS record, both ways
    assert all(each.get("a") == b"b" * 300_000 for each in clients)

    def count(one: TCPStore) -> None:
        for _ in range(50):
            one.add("n", 1)

    threads = [threading.Thread(target=count, args=(one,)) for one in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patient(60))
    assert store.add("n", 0) == 250
    waits = threading.Thread(target=lambda: clients[1].wait(["late"]))
    waits.start()
    store.set("late", "1")
    waits.join(patient(30))
    assert not waits.is_alive()


def test_a_node_with_another_secret_or_for_another_door_is_refused(
    store: TCPStore, gate: ProxyServer
) -> None:
    with pytest.raises(ProxyRefusedError, match="different secret"):
        ProxyClient(("127.0.0.1", gate.port), OTHER, NAME).check()
    elsewhere = ProxyClient(("127.0.0.1", gate.port), KEY, store.port)  # what nobody has opened
    with socket.create_connection(("127.0.0.1", elsewhere.port), timeout=patient(20)) as plain:
        with suppress(ConnectionError):
            assert plain.recv(1) == b""
    store.set("still", "here")


def test_a_store_without_a_gate_is_no_gate(store: TCPStore, gate: ProxyServer) -> None:
    """Downgrade: node 0 without a secret, or somebody in its place."""
    with pytest.raises(OSError, match="no node 0 with a secret"):
        ProxyClient(("127.0.0.1", store.port), KEY, NAME).check()
    assert is_proxy(("127.0.0.1", gate.port)) and not is_proxy(("127.0.0.1", store.port))


def test_nobody_without_the_secret_reaches_the_store(store: TCPStore, gate: ProxyServer) -> None:
    way = ProxyClient(("127.0.0.1", gate.port), KEY, NAME)
    one = client(way.port)
    junk = [b"", b"\0" * 600, b"GET / HTTP/1.0\r\n\r\n", secrets.token_bytes(4000), b"\x16\x03\x01\x02\0\x01"]
    held = []
    for turn in range(300):
        stranger = socket.create_connection(("127.0.0.1", gate.port))
        with suppress(OSError):
            stranger.sendall(junk[turn % len(junk)])
        held.append(stranger)  # half open, for ever
        if turn % 50 == 0:
            one.set(f"turn-{turn}", "1")
            ProxyClient(("127.0.0.1", gate.port), KEY, NAME).check()
    assert not store.check(["anything"]) and store.check(["turn-250"])
    for stranger in held:
        stranger.close()


def test_a_crowd_from_one_address_pushes_out_nobody_of_another(gate: ProxyServer) -> None:
    slow = socket.create_connection(("127.0.0.1", gate.port), source_address=("127.0.0.2", 0))
    count = 3 * tls_proxy.MAX_UNAUTHENTICATED
    crowd = [socket.create_connection(("127.0.0.1", gate.port)) for _ in range(count)]
    for each in crowd:
        assert each.recv(len(tls_proxy.GREETING)) in (tls_proxy.GREETING, b"")
    connect_as_node(slow, KEY, NAME).close()
    for each in crowd:
        each.close()


def test_a_recorded_node_is_not_let_in_again(pair: tuple[socket.socket, socket.socket]) -> None:
    """All that a node has said, word for word, on a connection of its own."""
    recorded: list[bytes] = []

    one, other = pair
    tap = socket.socketpair()

    def copy() -> None:
        with suppress(OSError):
            while data := tap[1].recv(65536):
                recorded.append(data)
                one.sendall(data)

    def back() -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                tap[1].sendall(data)

    for work in (copy, back):
        threading.Thread(target=work, daemon=True).start()
    assert both(lambda: connect_as_node(tap[0], KEY, NAME), lambda: accept_node(other, KEY)) == ([], [])
    assert len(b"".join(recorded)) > 100
    again = socket.socketpair()
    with again[0], again[1]:

        def replay() -> None:
            for data in recorded:
                again[0].sendall(data)
                time.sleep(0.1)
            again[0].shutdown(socket.SHUT_WR)

        _, refused = both(replay, lambda: accept_node(again[1], KEY))
    assert len(refused) == 1 and isinstance(refused[0], OSError)


def test_somebody_in_between_who_hands_all_on_is_refused() -> None:
    """Two TLS connections, and every word of the proofs handed on as it is."""
    left, right = socket.socketpair(), socket.socketpair()

    def in_between() -> None:
        with suppress(OSError):
            left[1].sendall(right[0].recv(len(tls_proxy.GREETING)))
            near = tls_proxy._context(True).wrap_socket(left[1], server_side=True)
            far = tls_proxy._context(False).wrap_socket(right[0])
            near.sendall(far.recv(4096))
            far.sendall(near.recv(4096))
            near.sendall(far.recv(4096))

    threading.Thread(target=in_between, daemon=True).start()
    asking, answering = both(lambda: connect_as_node(left[0], KEY, NAME), lambda: accept_node(right[1], KEY))
    assert isinstance(answering[0], ProxyRefusedError) and asking and isinstance(asking[0], OSError)


def test_a_node_0_that_knows_no_secret_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair

    def pretend() -> None:
        other.sendall(tls_proxy.GREETING)
        connection = tls_proxy._context(True).wrap_socket(other, server_side=True)
        connection.sendall(bytes(32))
        said = tls_proxy._exactly(connection, 32 + 2 + 32)
        connection.sendall(said[-32:])  # its own proof, as if it were ours
        with suppress(OSError):
            connection.recv(1)

    refused, _ = both(lambda: connect_as_node(one, KEY, NAME), pretend)
    assert isinstance(refused[0], ProxyRefusedError)


def test_only_tls_of_the_one_kind_is_spoken(gate: ProxyServer) -> None:
    for version in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = version
        with socket.create_connection(("127.0.0.1", gate.port), timeout=patient(20)) as plain:
            assert plain.recv(len(tls_proxy.GREETING)) == tls_proxy.GREETING
            with pytest.raises(OSError, match=r"."):
                context.wrap_socket(plain)


def test_the_secret_is_taken_from_a_variable_or_a_file(tmp_path: Path) -> None:
    text = "0123456789abcdef"
    (tmp_path / "secret").write_text(text + "\n")
    environ = {"TANDEM_JOB_SECRET": text, "HOME": "/"}
    key = take_key(environ)
    assert environ == {"HOME": "/"}, "ranks, and what they start, do not have it"
    assert key == take_key({"TANDEM_JOB_SECRET_FILE": str(tmp_path / "secret")})
    assert key == hmac.digest(text.encode(), b"tandem: nodes of one job", "sha256")
    assert take_key({}) is None and take_key({"TANDEM_JOB_SECRET": "", "TANDEM_JOB_SECRET_FILE": ""}) is None


def test_a_secret_in_the_dotenv_file_counts_where_the_environment_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, other = "0123456789abcdef", "fedcba9876543210"
    (tmp_path / ".env").write_text(f"TANDEM_JOB_SECRET={text}\n")
    assert take_key({}) == take_key({"TANDEM_JOB_SECRET": text}) is not None
    assert take_key({"TANDEM_JOB_SECRET": other}) != take_key({})
    (tmp_path / "secret").write_text(other)
    (tmp_path / ".env").write_text("TANDEM_JOB_SECRET_FILE=secret\n")
    assert take_key({}) == take_key({"TANDEM_JOB_SECRET": other})
    (tmp_path / ".env").write_text("TANDEM_JOB_SECRET=short\n")
    with pytest.raises(ConfigError, match="5 characters"):
        take_key({})


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"TANDEM_JOB_SECRET": "short"}, "5 characters; expected 16 to 4096"),
        ({"TANDEM_JOB_SECRET": "x" * 20, "TANDEM_JOB_SECRET_FILE": "/x"}, "both set"),
        ({"TANDEM_JOB_SECRET_FILE": "/nowhere/secret"}, "cannot read /nowhere/secret"),
        ({"TANDEM_JOB_SECRET_FILE": "/dev/zero"}, "4097 characters"),
        ({"TANDEM_JOB_SECRET_FILE": "/dev/null"}, "0 characters"),
    ],
)
def test_a_secret_that_is_none_is_one_line(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        take_key(dict(environ))
    assert "x" * 20 not in str(error.value)
