"""The service `job` of `docker compose up`, without an engine: names and exit codes are files of the test."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tandem.platforms import compose

ROOT = Path(__file__).parents[2]


@pytest.fixture
def follow_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program; `names` are the containers that Docker's resolver knows."""
    spec = importlib.util.spec_from_file_location("follow_job", ROOT / "compose" / "follow_job.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.names = set()

    def resolve(name: str) -> str:
        if name not in module.names:
            raise OSError(name)
        return "10.0.0.1"

    monkeypatch.setattr(module.socket, "gethostbyname", resolve)
    monkeypatch.setattr(module, "NOTES", tmp_path)
    monkeypatch.setattr(compose, "NOTES", tmp_path)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    return module


def follow(module: Any, folder: Path, codes: dict[str, int]) -> int:
    nodes, log = module.Nodes("own", 2), module.Log(folder)
    for container, code in codes.items():
        compose.note_end(folder / "run", container, code)
    return int(module.follow(nodes, log, [], module.Waits(poll=0.01, gone=0.1)))


@pytest.mark.parametrize(("codes", "code"), [
    ({"a": 0, "b": 0}, 0), ({"a": 0, "b": 7}, 7), ({"a": 2, "b": 7}, 2), ({"a": 143, "b": 143}, 143),
    ({"a": 0}, 137), ({}, 137), ({"a": 200, "b": 7}, 7),
])  # fmt: skip
def test_the_code_is_the_jobs(follow_job: Any, tmp_path: Path, codes: dict[str, int], code: int) -> None:
    """A node that has left none was killed."""
    assert follow(follow_job, tmp_path / "log", codes) == code


def test_only_what_is_written_from_now_on_is_shown(
    follow_job: Any, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    (folder / "rank-0.log").write_text("old\n")
    log = follow_job.Log(folder)
    with (folder / "rank-0.log").open("a") as file:
        file.write("new\nhalf")
    (folder / "node-1.log").write_text("node\n")
    (folder / "rank-1.log").write_text("not shown\n")
    log.show()
    assert capfdbinary.readouterr().out == b"node\nnew\n"
    (folder / "rank-0.log").write_text("")
    log.show()
    (folder / "rank-0.log").write_text("on\n")
    log.show()
    assert capfdbinary.readouterr().out == b"on\n", "the file was put aside meanwhile"


@pytest.mark.parametrize("there", [{"own-node-1"}, {"own-node-1", "own-node-2", "own-node-3"}])
def test_other_containers_than_nodes_says_are_refused(
    follow_job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], there: set[str]
) -> None:
    follow_job.names = there
    assert follow_job.main("own", "2", str(tmp_path), follow_job.Waits(poll=0.01, start=0.1)) == 2
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "--scale" in said and "NODES=2 docker compose up" in said


def test_a_code_is_forgotten_when_the_container_starts_again(tmp_path: Path, follow_job: Any) -> None:
    compose.note_end(tmp_path, "a", 200)
    assert list(tmp_path.glob("code-*.json"))
    compose.note_start("a")
    assert not list(tmp_path.glob("code-*.json"))
