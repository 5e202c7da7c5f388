"""Token and TLS: whoever lacks the token sees nothing, and what is wrong with the files is said at once."""

import base64
import http.client
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import patient
from tandem.config import Settings
from tandem.errors import ConfigError
from tandem.report.server import MetricsServer
from tandem.report.web import Access, is_local_name, load_access
from tandem.telemetry.registry import Registry

TOKEN = "s3cret-ü"
LOCAL_NAMES = (
    *(None, "", "localhost", "localhost:19469", "LOCALHOST.:1"),
    *("127.0.0.1", "127.0.0.1:19469", "10.1.2.3:80"),
    *("[::1]", "[::1]:19469", "node1", "node1:19469", "run.localhost:19469"),
)
FOREIGN_NAMES = (
    *(
        "evil.example",
        "evil.example:19469",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "a.b",
        "x.local",
    ),
    *("127.0.0.1 .evil", "evil.example.:80", "127.0.0.1.nip.io:19469"),
)


@pytest.mark.parametrize("name", LOCAL_NAMES)
def test_a_page_on_a_laptop_is_read_by_its_own_names(name: str | None) -> None:
    assert is_local_name(name) and asked_by(name) == 200


@pytest.mark.parametrize("name", FOREIGN_NAMES)
def test_and_by_no_foreign_one(name: str) -> None:
    assert not is_local_name(name) and asked_by(name) == 421
    assert asked_by(name, Access(TOKEN)) == 401, "with a token it is the token that counts"
    assert asked_by(name, host="0.0.0.0") == 200, "there, who reaches it may read it"


def asked_by(name: str | None, access: Access | None = None, host: str = "127.0.0.1") -> int:
    """The status of /api/run for a request with this Host header; None: without one."""
    server = MetricsServer(Registry(), host, 0, lambda: {"healthy": True}, access=access)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=patient(20))
    try:
        connection.putrequest("GET", "/api/run", skip_host=True)
        if name is not None:
            connection.putheader("Host", name)
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()
        server.close()


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()


@pytest.mark.parametrize(("header", "allowed"), [
    (None, False), ("", False), ("Bearer", False), (f"Bearer {TOKEN}", True), (f"bearer {TOKEN}", True),
    (f"Bearer {TOKEN}x", False), (f"Digest {TOKEN}", False), (basic(TOKEN), True), (basic("no"), False),
    ("Basic §§§", False), ("Basic /w==", False), (TOKEN, False),
])  # fmt: skip
def test_headers(header: str | None, allowed: bool) -> None:
    assert Access(TOKEN).allows(header) == allowed
    assert Access().allows(header)


@pytest.fixture
def guarded() -> Iterator[MetricsServer]:
    server = MetricsServer(
        Registry(), "127.0.0.1", 0, lambda: {"healthy": True, "run": "hidden"}, access=Access("abc")
    )
    yield server
    server.close()


def ask(server: MetricsServer, path: str, token: str | None = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=patient(10))
    access = {"Authorization": f"Bearer {token}"} if token else {}
    connection.request("GET", path, headers={"User-Agent": "Prometheus/3.5.0", **access})
    return connection.getresponse()


@pytest.mark.parametrize("path", ["/", "/metrics", "/api/run", "/api/history", "/nothing"])
def test_without_the_token_there_is_nothing(guarded: MetricsServer, path: str) -> None:
    refused = ask(guarded, path)
    assert refused.status == 401 and "Basic" in refused.headers["WWW-Authenticate"]
    assert b"hidden" not in refused.read() and not guarded.scraped
    assert ask(guarded, path, "abc").status in (200, 404)


def test_probes_need_no_token_and_say_no_more_than_yes(guarded: MetricsServer) -> None:
    answer = ask(guarded, "/healthz")
    assert answer.status == 200 and b"hidden" not in answer.read()
    assert b"hidden" in ask(guarded, "/healthz", "abc").read()


@pytest.mark.parametrize("settings", [
    {"metrics_token_file": "missing"}, {"metrics_token_file": "empty"},
    {"metrics_tls": "empty"}, {"metrics_tls": "missing"}, {"metrics_tls": "empty,empty"},
])  # fmt: skip
def test_files_that_cannot_be_used_are_an_error(
    settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").write_text(" \n")
    with pytest.raises(ConfigError, match="--metrics-"):
        load_access(Settings.from_dict(settings).metrics)


def test_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not available here")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=tmp_path, check=True, capture_output=True, timeout=patient(60),
    )  # fmt: skip
    files = {"metrics_tls": f"{tmp_path}/cert.pem,{tmp_path}/key.pem"}
    access = load_access(Settings.from_dict(files).metrics)
    server = MetricsServer(Registry(), "127.0.0.1", 0, dict, access=access)
    try:
        assert server.url.startswith("https://")
        plain = http.client.HTTPConnection("127.0.0.1", server.port, timeout=patient(10))
        with pytest.raises((OSError, http.client.HTTPException)):
            plain.request("GET", "/metrics")
            plain.getresponse()
        trusted = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        connection = http.client.HTTPSConnection(
            "127.0.0.1", server.port, timeout=patient(10), context=trusted
        )
        connection.request("GET", "/metrics")
        assert b"tandem_run_state" in connection.getresponse().read()
    finally:
        server.close()
