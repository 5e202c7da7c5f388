import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import patient
from tandem.report import server as server_module
from tandem.report.server import MetricsServer
from tandem.report.web import Access
from tandem.telemetry import metrics
from tandem.telemetry.channel import Receiver, Sender
from tandem.telemetry.messages import Event, Heartbeat, Message, RunStarted, Samples, decode, encode
from tandem.telemetry.registry import Registry
from tandem.timeouts import PAGE_SECONDS

STATUS: dict[str, object] = {"healthy": True, "state": "training", "loss": float("nan")}


@pytest.fixture
def status() -> dict[str, object]:
    return dict(STATUS)


@pytest.fixture
def server(status: dict[str, object]) -> Iterator[MetricsServer]:
    server = MetricsServer(Registry(), "127.0.0.1", 0, lambda: status)
    yield server
    server.close()


def ask(
    server: MetricsServer, path: str, method: str = "GET", timeout: float | None = 20, **headers: str
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): v for name, v in headers.items()})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def raw(server: MetricsServer, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=patient(10)) as client:
        try:
            client.sendall(data)
            return client.recv(100)
        except ConnectionError:
            return b""


def wait_for(condition: object, seconds: float = 5.0) -> bool:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def test_paths(server: MetricsServer, status: dict[str, object]) -> None:
    code, page = ask(server, "/metrics?x=1")
    assert code == 200 and b"tandem_run_state" in page
    assert ask(server, "/healthz")[0] == 200
    assert ask(server, "/readyz")[0] == 503
    server.metrics.apply([metrics.RUN_STATE.enter("training")])
    assert ask(server, "/readyz")[0] == 200
    assert json.loads(ask(server, "/api/run")[1])["loss"] == "NaN"
    assert b"textContent" in ask(server, "/")[1]
    assert ask(server, "/api/history")[0] == 200
    assert ask(server, "/../etc/passwd")[0] == 404
    status["healthy"] = False
    assert ask(server, "/healthz")[0] == 503


def test_the_log_is_for_loopback_or_for_who_has_the_token() -> None:
    def lines() -> dict[str, object]:
        return {"lines": ["a line"]}

    for host, access, is_shown in (
        ("127.0.0.1", None, True),
        ("0.0.0.0", None, False),
        ("0.0.0.0", Access("word"), True),
    ):
        server = MetricsServer(Registry(), host, 0, dict, dict, access, lambda: {"command": "x"}, lines)
        try:
            said = json.loads(server.answer("/api/log", "")[2])
            assert (said == lines()) == is_shown and ("--metrics-token-file" in str(said)) != is_shown
            assert json.loads(server.answer("/api/about", "")[2]) == {"command": "x"}
            assert server.answer("/api/log", "", allowed=False)[0] == 401
        finally:
            server.close()


def test_a_status_that_raises_is_unhealthy() -> None:
    def broken() -> dict[str, object]:
        raise RuntimeError("no")

    server = MetricsServer(Registry(), "127.0.0.1", 0, broken)
    try:
        assert ask(server, "/healthz")[0] == 503
        assert ask(server, "/api/run")[0] == 200
    finally:
        server.close()


def test_only_get_and_head(server: MetricsServer) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "BREW"):
        assert ask(server, "/metrics", method)[0] == 405
    assert ask(server, "/metrics", "HEAD", User_Agent="Prometheus/3.5.0") == (200, b"")
    assert not server.scraped


def test_garbage_does_not_stop_it(server: MetricsServer) -> None:
    raw(server, b"\x00\xff" * 5000 + b"\r\n\r\n")
    raw(server, b"GET /" + b"a" * 100_000)
    raw(server, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 2000 + b"\r\n")
    raw(server, b"\r\n\r\n")
    raw(server, b"GET /metrics HTTP/1.1\r\nAccept: text/plain;version=x.y\r\n\r\n")
    assert ask(server, "/metrics")[0] == 200


def test_200_clients_are_all_answered(server: MetricsServer) -> None:
    codes: list[int] = []

    def client() -> None:
        codes.append(ask(server, "/healthz")[0])

    threads = [threading.Thread(target=client) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert codes == [200] * 200


def test_200_clients_that_say_nothing_keep_nobody_out(server: MetricsServer) -> None:
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    try:
        for client in clients[::2]:
            client.sendall(b"GET /metrics HT")
        for _ in range(3):
            assert ask(server, "/metrics")[0] == 200  # with Prometheus' patience of 10 s and more
    finally:
        for client in clients:
            client.close()


def test_a_busy_port_warns_and_takes_another(server: MetricsServer, caplog: pytest.LogCaptureFixture) -> None:
    other = MetricsServer(Registry(), "127.0.0.1", server.port, dict)
    try:
        assert other.port not in (0, server.port)
        assert "instead" in caplog.text
        assert ask(other, "/metrics")[0] == 200
    finally:
        other.close()


def test_a_bad_host_falls_back_to_loopback() -> None:
    server = MetricsServer(Registry(), "192.0.2.1", 0, dict)
    try:
        assert server.host == "127.0.0.1"
    finally:
        server.close()


FOR_EVER = 10**6  # the limit of the test is far below that


def test_linger_is_over_at_once_if_never_scraped(server: MetricsServer) -> None:
    server.metrics.apply([metrics.RUN_STATE.enter("failed")])
    looks: list[int] = []
    server.linger(FOR_EVER, lambda: bool(looks.append(1)))
    assert not looks


def test_linger_is_over_at_once_if_only_a_person_has_looked(server: MetricsServer) -> None:
    ask(server, "/metrics", User_Agent="curl/8.5.0")
    server.metrics.apply([metrics.RUN_STATE.enter("failed")])
    looks: list[int] = []
    server.linger(FOR_EVER, lambda: bool(looks.append(1)))
    assert not looks


@pytest.mark.parametrize(
    "headers", [{"User_Agent": "Prometheus/3.5.0"}, {"X_Prometheus_Scrape_Timeout_Seconds": "10"}]
)
def test_linger_waits_for_a_scrape_of_the_final_state(
    server: MetricsServer, headers: dict[str, str]
) -> None:
    ask(server, "/metrics", **headers)
    assert wait_for(lambda: server.scraped)
    server.metrics.apply([metrics.RUN_STATE.enter("succeeded")])
    looks: list[int] = []
    server.linger(0.3, lambda: bool(looks.append(1)))
    assert looks, "it waited"
    server.linger(FOR_EVER, lambda: len(looks) > 3 or bool(looks.append(1)))
    ask(server, "/metrics")
    server.linger(FOR_EVER, lambda: len(looks) > 6 or bool(looks.append(1)))
    threading.Timer(0.2, ask, (server, "/metrics"), headers).start()
    server.linger(FOR_EVER)


def test_linger_waits_for_a_page_that_is_open(server: MetricsServer) -> None:
    """Also where the run is stopped, and though nobody scrapes; but only as long as a page takes."""
    ask(server, "/api/run")
    assert wait_for(lambda: server._last_read["/api/run"] > 0)
    server.metrics.apply([metrics.RUN_STATE.enter("failed")])
    final = server.metrics.final_since
    assert final is not None
    threading.Timer(0.2, ask, (server, "/api/run")).start()
    server.linger(FOR_EVER, lambda: True)
    assert server._last_read["/api/run"] >= final or time.monotonic() >= final + PAGE_SECONDS
    server._last_read["/api/run"] = final - 0.05
    server.linger(FOR_EVER, lambda: True, page_seconds=0.1)


def test_the_last_page_is_written(tmp_path: Path) -> None:
    Registry().write_last_page(tmp_path / "metrics.prom")
    assert b"tandem_run_state" in (tmp_path / "metrics.prom").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.prom"]


@pytest.mark.parametrize("depth", [0, 3])
def test_samples_arrive_also_over_a_long_path(tmp_path: Path, depth: int) -> None:
    path = tmp_path.joinpath(*["d" * 60] * depth) / "samples.sock"
    got: list[Message] = []
    receiver = Receiver(path, got.append)
    sender = Sender(path)
    assert sender.send(Samples([metrics.STEPS.inc()]))
    assert wait_for(lambda: len(got) == 1)
    receiver.close()
    assert not sender.send(RunStarted(1, 1, 1))
    second = Receiver(path, got.append)
    assert sender.send(RunStarted(2, 1, 1))
    second.close()
    assert got[-1] == RunStarted(2, 1, 1)
    sender.close()


def test_malformed_datagrams_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "s"
    registry = Registry()

    def apply(message: Message) -> None:
        assert isinstance(message, Samples)
        registry.apply(message.samples)

    receiver = Receiver(path, apply, registry.count_error)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.connect(str(path))
        for data in (b"", b"\xff", b"[1]", b"[" * 50_000, b'"' + b"a" * 70_000 + b'"', b'{"is": "X"}'):
            client.send(data)
        client.send(encode(Samples([metrics.RUN_STATE.enter("training")])))
    receiver.close()
    assert receiver.malformed == 6
    assert registry.registry.get_sample_value("tandem_collect_errors_total", {"source": "datagram"}) == 6
    assert registry.state == "training"


def test_the_sender_never_raises_or_waits(tmp_path: Path) -> None:
    sender = Sender(tmp_path / "none" / "s")
    assert not sender.send(RunStarted(1, 1, 1))
    assert not sender.send(Event("x", 1.0, {"a": object()}))
    path = tmp_path / "full"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as nobody_reads:
        nobody_reads.bind(str(path))
        sender = Sender(path)
        assert not sender.send(Event("x" * 70_000, 1.0, {}))
        assert not all([sender.send(Event("x" * 1000, 1.0, {})) for _ in range(2000)])
    assert sender.dropped > 0


def test_what_a_busy_agent_has_not_read_arrives_in_order(tmp_path: Path) -> None:
    path = tmp_path / "busy"
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    agent.bind(str(path))
    agent.settimeout(patient(10))
    sender = Sender(path)
    beat = Heartbeat(0, 1, "train", "forward", 0.0, 60.0, 60.0, True, False)
    in_queue = [sender.send(RunStarted(number, 1, 1)) for number in range(100)]
    assert in_queue[0] and not in_queue[-1], "the kernel's queue is shorter"
    assert not sender.send(beat) and sender.dropped == 1
    got: list[Message] = []

    def read() -> None:
        while len(got) < 100:
            got.append(decode(agent.recv(100_000)))

    reader = threading.Thread(target=read)
    reader.start()
    sender.close()
    reader.join()
    agent.close()
    assert got == [RunStarted(number, 1, 1) for number in range(100)]


def test_a_rank_that_ends_does_not_wait_long_for_a_stopped_agent(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "stopped"))
        sender = Sender(tmp_path / "stopped")
        while sender.send(RunStarted(1, 1, 1)):
            pass
        sender.close()
    sender.close()  # nobody is there any more


def test_a_page_is_held_until_the_end_and_gets_all_of_it() -> None:
    """Its connection is there already: a page that is late to ask on a busy host hears of the end, too."""
    status: dict[str, object] = {"state": "training"}
    server = MetricsServer(Registry(), "127.0.0.1", 0, lambda: status, lambda: {"points": [1]})
    answers: list[tuple[int, bytes]] = []

    def page() -> None:
        answers.append(ask(server, "/api/end", timeout=None))

    pages = [threading.Thread(target=page) for _ in range(3)]
    try:
        for thread in pages:
            thread.start()
        assert wait_for(lambda: server._held == 3, patient(60)) and not answers
        status["ending"] = {"state": "finished"}
        server.metrics.apply([metrics.RUN_STATE.enter("succeeded")])
        server.linger(FOR_EVER)
        assert server._held == 0 or time.monotonic() > (server.metrics.final_since or 0) + PAGE_SECONDS
    finally:
        server.close()
    for thread in pages:
        thread.join()
    assert [code for code, _ in answers] == [200] * 3
    said = json.loads(answers[0][1])
    assert said["run"]["ending"] == {"state": "finished"} and said["history"] == {"points": [1]}


def test_only_some_pages_are_held_and_none_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    short = MetricsServer(Registry(), "127.0.0.1", 0, dict, hold_seconds=0.0)
    assert ask(short, "/api/end") == (200, b"{}\n")
    short.close()
    monkeypatch.setattr(server_module, "MOST_HELD", 1)
    server = MetricsServer(Registry(), "127.0.0.1", 0, dict, hold_seconds=FOR_EVER)
    held = threading.Thread(target=ask, args=(server, "/api/end", "GET", None))
    held.start()
    assert wait_for(lambda: server._held == 1, patient(60))
    assert ask(server, "/api/end") == (200, b"{}\n")
    assert wait_for(lambda: server._held == 1, patient(60)), "the first still waits"
    server.close()
    held.join()
    assert wait_for(lambda: server._held == 0, patient(60))
