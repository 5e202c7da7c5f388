"""What goes wrong around a cluster of containers: no engine, no image, a taken port, two commands at once."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cluster import actions, engine, preflight, volume
from tandem.cluster import actions as cluster

ROOT = Path(__file__).parents[2]
NO_RUN = argparse.Namespace(project="own", run=None, image="image")


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A `docker` that is a shell script."""

    def play(script: str) -> None:
        program = tmp_path / "docker"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return play


@pytest.mark.parametrize("said", [
    "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
    "error during connect: Get http://x: dial tcp: lookup x: no such host",
])  # fmt: skip
def test_an_engine_that_goes_is_one_line_that_says_what_to_do(played: Any, said: str) -> None:
    """In whatever command it is noticed: what is left unchecked would take the nodes for removed."""
    played(f"echo '{said}' >&2; exit 1")
    started = engine.Cluster("own", {"IMAGE": "x", "RUN": "x"})
    for command in (
        lambda: engine.docker("ps"),
        lambda: engine.docker("inspect", "x", check=False),
        lambda: started.compose("stop"),
        started.nodes,
        lambda: cluster.remove_all(started, []),
        lambda: cluster.watch(started),
    ):
        with pytest.raises(engine.EngineGoneError) as error:
            command()
        assert "\n" not in str(error.value) and error.value.exit_code == 200
        assert [word for word in ("systemctl", "make compose-up") if word not in str(error.value)] == []


def test_an_engine_that_hangs_is_one_line(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "CALL_SECONDS", 0.2)
    started = engine.Cluster("own", {"IMAGE": "x", "RUN": "x"})
    hung = "exec sleep 60"
    gone = "echo 'Cannot connect to the Docker daemon' >&2; exit 1"
    for script, command in (
        (hung, lambda: engine.docker("ps")),
        (hung, lambda: started.compose("ps")),
        (hung, lambda: started.read("/checkpoints/x/events.jsonl")),
        (f'[ "$1" = version ] && {hung}; {gone}', lambda: engine.docker("ps")),
        (f'[ "$1" = run ] && {hung}; echo v', lambda: volume.read("v", "image", "/checkpoints/x")),
        (f'[ "$1" = run ] && {hung}; echo own_checkpoints', lambda: volume.get(NO_RUN)),
    ):
        played(script)
        with pytest.raises(engine.ClusterError, match="took longer than") as error:
            command()
        assert "\n" not in str(error.value)


def test_a_registry_that_does_not_answer_is_not_the_engine(played: Any) -> None:
    """Compose 2.26 says of both that it cannot connect to the daemon."""
    played('[ "$1" = version ] || { echo "Cannot connect to the Docker daemon" >&2; exit 1; }')
    with pytest.raises(engine.ClusterError) as error:
        cluster.watch(engine.Cluster("own", {"IMAGE": "x", "RUN": "x"}, watched=True))
    assert error.value.exit_code == 2 and "GRAFANA_IMAGE=" in str(error.value)


def test_an_image_of_the_watchers_that_cannot_be_had_is_a_line_with_the_variables(played: Any) -> None:
    played("echo 'Error response from daemon: manifest unknown' >&2; exit 1")
    with pytest.raises(engine.ClusterError) as error:
        cluster.watch(engine.Cluster("own", {"IMAGE": "x", "RUN": "x"}, watched=True))
    words = ("MONITORING=1", "manifest unknown", "PROMETHEUS_IMAGE=", "GRAFANA_IMAGE=")
    assert [word for word in words if word not in str(error.value)] == [] and "\n" not in str(error.value)


def test_down_beside_an_up_that_removes_the_same_tries_again(played: Any, tmp_path: Path) -> None:
    busy = "echo 'Error response from daemon: removal of container 12 is already in progress' >&2; exit 1"
    played(f"echo >>{tmp_path}/calls; [ $(wc -l <{tmp_path}/calls) -gt 2 ] || {{ {busy}; }}")
    own = engine.Cluster("own", {})
    cluster.remove_all(own, [], pause=0.0)
    assert (tmp_path / "calls").read_text() == "\n" * 3
    played(busy)
    with pytest.raises(engine.ClusterError, match="already in progress"):
        cluster.remove_all(own, [], pause=0.0)


def test_a_taken_port_names_the_container_that_has_it(played: Any) -> None:
    import socket

    played("echo other-metrics-1 other")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(engine.ClusterError, match=rf"{port}.*other-metrics-1.*=other.*METRICS_PORT"):
            preflight.check_free(port)


@pytest.mark.parametrize(("given", "size"), [("2gb", "2g"), ("512M", "512m"), ("100000", "100000")])
def test_the_size_of_tmp_is_one_the_kernel_takes(
    monkeypatch: pytest.MonkeyPatch, given: str, size: str
) -> None:
    for name in actions.LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMP_SIZE", given)
    assert actions.limits_given() == {"TMP_SIZE": size}
    monkeypatch.setenv("TMP_SIZE", "much")
    with pytest.raises(engine.ClusterError, match="TMP_SIZE=much"):
        actions.limits_given()


@pytest.mark.parametrize("name", ["compose.yaml", "monitoring.yaml", "job.yaml"])
def test_every_container_has_bounds_for_its_log_and_its_temporary_files(name: str) -> None:
    services = yaml.safe_load((ROOT / "compose" / name).read_text())["services"]
    for service in [each for each in services.values() if "image" in each]:  # job.yaml adds to others
        assert {"max-size", "max-file"} <= set(service["logging"]["options"])
        assert service["logging"]["driver"] == "json-file"  # its options are no other driver's
        assert all("size=" in mount for mount in service.get("tmpfs", []))


def test_prometheus_and_grafana_are_a_profile_and_the_job_is_followed() -> None:
    """Also where no Compose is: what `docker compose up` in a fresh clone goes by."""
    whole = yaml.safe_load((ROOT / "compose.yaml").read_text())
    (included,) = whole["include"]
    services: dict[str, dict[str, Any]] = {}
    for path in included["path"]:
        for name, service in yaml.safe_load((ROOT / path).read_text())["services"].items():
            services.setdefault(name, {}).update(service)
    watchers = {name for name, each in services.items() if each.get("profiles") == ["monitoring"]}
    assert watchers == {"prometheus", "grafana"}
    assert [name for name in services.keys() - watchers if services[name].get("attach", True)] == ["job"]
    assert services["node"]["build"] == services["job"]["build"]


@pytest.mark.parametrize(("name", "ends"), [("nobody.invalid", True), ("localhost", False)])
def test_the_forwarder_ends_when_all_nodes_are_gone(
    name: str, ends: bool, free_port: int, processes: Any
) -> None:
    program = f"forward.run({free_port}, '127.0.0.1', 9, {name!r}, start=0.2, poll=0.2)"
    program = f"import asyncio; import forward; asyncio.run({program})"
    process = processes.start([sys.executable, "-c", program], cwd=ROOT / "compose")
    if ends:
        code, output = processes.wait(process, 60)
        assert code == 0, output
    else:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
