"""`tandem cluster`: its words, what it refuses, where its files and images come from."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patience import patient
from tandem import shipped
from tandem.cluster import actions, command_line, project
from tandem.cluster.engine import Cluster, ClusterError, Wording, typed
from tandem.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def as_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages as of `tandem cluster`."""
    monkeypatch.setattr(Wording, "is_make", False)


@pytest.mark.parametrize(("made", "said"), [
    ("start one: make compose-up NODES=2", "start one: tandem cluster up --nodes 2"),
    ("make compose-get RUN=digits PROJECT=own", "tandem cluster get --run digits --project own"),
    ("make chaos FAULT=kill-rank", "tandem cluster chaos kill-rank"),
    ("NODES: invalid value 'x'; expected 1", "--nodes: invalid value 'x'; expected 1"),
    ("kept (VOLUMES=1 removes own_data)", "kept (--volumes removes own_data)"),
    ("MONITORING=1: no; PROMETHEUS_IMAGE=NAME", "--monitoring: no; PROMETHEUS_IMAGE=NAME"),
    ("see make compose-logs", "see tandem cluster logs"),
    ("GPUS: invalid value '/RUN/TASK'", "--gpus: invalid value '/RUN/TASK'"),
    ("make compose-up CPUS=2", "tandem cluster up CPUS=2"),
])  # fmt: skip
def test_messages_name_what_was_typed(as_verb: None, made: str, said: str) -> None:
    assert typed(made) == said
    Wording.is_make = True
    assert typed(made) == made


@pytest.mark.parametrize(("words", "key"), [
    (["down", "--rate", "1mbit"], "--rate is not an option of `cluster down`; expected --project, --volumes"),
    (["up", "--volumes"], "--volumes is not an option of `cluster up`"),
    (["up", "kill-rank"], "unexpected argument 'kill-rank'"),
    (["upp"], "invalid choice: 'upp'"),
    (["up", "--node", "1"], "--node is not an option"),
    ([], "action"),
])  # fmt: skip
def test_what_an_action_does_not_take_is_one_line(words: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        command_line.parsed(words)
    assert key in str(error.value) and "\n" not in str(error.value) and error.value.exit_code == 2


@pytest.mark.parametrize(("words", "key"), [
    (["up", "--nodes", "two"], "--nodes"),
    (["up", "--spares", "x"], "--spares"),
    (["up", "--nodes", "1", "--spares", "1"], "--spares"),
    (["up", "--rate", "fast"], "--rate"),
    (["up", "--metrics-port", "0"], "--metrics-port"),
    (["up", "--gpus", "x"], "--gpus"),
    (["up", "--epochs", "x"], "--epochs"),
    (["up", "--monitoring", "5"], "--monitoring"),
    (["up", "--task", "nope.py:X"], "nope.py"),
    (["up", "--script", "nope.py"], "nope.py"),
    (["up", "--run", "../x"], "--run"),
    (["up", "--args=a 'b"], "--args"),
    (["up", "--image=-v/:/x"], "--image"),
    (["ps", "--project", "UP/x"], "--project"),
    (["logs", "--project", "a b"], "--project"),
    (["down", "--volumes", "7"], "--volumes"),
    (["scale", "--nodes", "0"], "--nodes"),
    (["shell", "--node", "x"], "--node"),
    (["get", "--run", "../x"], "--run"),
    (["get", "--run", "digits", "--to", "."], "already exists"),
    (["chaos"], "kill-rank"),
    (["chaos", "nope"], "nope"),
    (["chaos", "hang", "--node", "x"], "--node"),
    (["down"], "docker is not installed"),
])  # fmt: skip
def test_arguments_are_checked_before_the_engine(words: list[str], key: str, tmp_path: Path) -> None:
    """There is no `docker` here at all: what is wrong with a word is said all the same."""
    (tmp_path / "a file").touch()
    environ = {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-S", "-m", "tandem", "cluster", *words],
        env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=patient(60),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert key in done.stderr and ("docker" in done.stderr) == ("docker" in key)


def test_switches_and_defaults() -> None:
    up = command_line.parsed(["up", "--monitoring", "--nodes", ""])
    assert (up.monitoring, up.nodes, up.project, up.task) == ("1", "2", "tandem", "")
    assert command_line.parsed(["down", "--volumes", "1"]).volumes == "1"
    assert command_line.parsed(["down"]).volumes == ""
    chaos = command_line.parsed(["chaos", "all", "--node", "2"])
    assert (chaos.fault, chaos.node) == ("all", "2")


def test_the_systems_python_is_enough_for_make(tmp_path: Path) -> None:
    """No package is imported but tandem's own; `docker` here is one that does nothing."""
    (tmp_path / "docker").write_text("#!/bin/sh\n[ $1 != compose ] || echo 2.30.0\n")
    (tmp_path / "docker").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src")}
    for words in (["-m", "tandem.cluster"], [str(ROOT / "compose/cluster.py")], ["-m", "tandem", "cluster"]):
        command = [sys.executable, "-S", *words, "ps"]
        done = subprocess.run(
            command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=patient(60)
        )
        start = "tandem cluster up --nodes 2" if words[-1] == "cluster" else "make compose-up NODES=2"
        line = f"no nodes in tandem; start some: {start}\n"
        assert (done.returncode, done.stdout) == (0, line), done.stderr




def test_a_projects_folder_has_its_own_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    up = command_line.parsed(["up"])
    assert project.image_of(up) == "tandem:cuda" and project.build_command("x")[0] == "make"
    (tmp_path / "Dockerfile").touch()
    assert project.image_of(up) == "tandem:cuda", "it may be another program's"
    (tmp_path / "compose.override.yaml").touch()
    name = project.name_of(tmp_path)
    assert project.image_of(up) == name
    assert project.build_command(name)[-3:] == ["--tag", name, str(tmp_path)]
    override = {"OVERRIDE_FILE": str(tmp_path / "compose.override.yaml")}
    assert project.own_variables(up) == {"RUN": name, **override}
    assert project.own_variables(command_line.parsed(["up", "--run", "mine"])) == override
    assert project.own_variables(command_line.parsed(["up", "--image", "mine"])) == {}
    assert project.own_variables(command_line.parsed(["up", "--task", "digits"])) == {}
    words = Cluster("own", {**override, "IMAGE": name}).command("up")
    assert words[words.index(override["OVERRIDE_FILE"]) - 1] == "-f"


def test_without_a_checkout_an_image_or_a_project_is_needed(
    as_verb: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shipped, "checkout", lambda: None)
    with pytest.raises(ClusterError) as error:
        actions.build(Cluster("own", {"IMAGE": "tandem:cuda"}))
    assert "--image NAME" in typed(str(error.value)) and "tandem init DIR" in str(error.value)
    assert error.value.exit_code == 2
    (tmp_path / "Dockerfile").touch()
    assert project.build_command("x")[:2] == ["docker", "build"]
    assert actions.variables_of(command_line.parsed(["up"]), 2, 19469)["TASKS"].endswith("compose")
    monkeypatch.setattr(actions, "ROOT", None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = actions.make_secret("own", {})
    assert path == tmp_path / "state/tandem/secrets/own" and len(path.read_text()) == 64
    shutil.rmtree(tmp_path / "state")
