"""The object stores of these tests, one process each for all tests of a module."""

import json
from pathlib import Path
from typing import Any

import fsspec.config
import pytest
from servers import SERVERS, ObjectServer, s3rver


@pytest.fixture(scope="module")
def started() -> dict[str, ObjectServer]:
    """The servers of this module: pytest makes `server` again where tests name other parameters for it."""
    return {}


@pytest.fixture(scope="module", params=SERVERS)
def server(
    request: pytest.FixtureRequest,
    started: dict[str, ObjectServer],
    tmp_path_factory: pytest.TempPathFactory,
    module_processes: Any,
    module_ports: list[int],
    require: Any,
) -> ObjectServer:
    if request.param == "s3rver":
        require("s3rver", s3rver() is not None, "type: make s3rver")
    if request.param not in started:
        first = 2 * SERVERS.index(request.param)
        folder = tmp_path_factory.mktemp(request.param)
        ports = module_ports[first : first + 2]
        started[request.param] = ObjectServer(request.param, folder, module_processes, ports)
    return started[request.param]


@pytest.fixture
def store_address(server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of this test's own, reachable from this process."""
    from tandem.checkpoint.storage import _cached_remote

    _cached_remote.cache_clear()
    monkeypatch.setitem(fsspec.config.conf, "s3", json.loads(server.environment["FSSPEC_S3"]))
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.calm()
    return f"s3://bucket/{tmp_path.name}/{server.kind}"
