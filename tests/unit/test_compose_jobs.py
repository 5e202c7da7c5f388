"""How a job of containers ends, and what is said of it: a played engine says nodes, files and events."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster import actions as cluster
from tandem.cluster import command_line, engine, network
from tandem.cluster import job as job

ROOT = Path(__file__).parents[2]

BORN, BEFORE = "2026-01-02T03:04:05.678912345Z", 1767323045.0 - 100
STOPPED = {
    "state": "stopped", "exit_code": 143, "global_step": 340, "last_checkpoint_step": 340,
    "eval": {"accuracy": 0.98}, "samples_per_second": 1234.5, "weights_sha256": "85e27141b3b4aa",
}  # fmt: skip
SAID = "stopped at step 340; accuracy 0.9800, 1,234 samples/s, weights 85e27141b3b4, checkpoint of step 340"


class Played(engine.Cluster):
    """A cluster whose containers and files the test says."""

    there: list[engine.Node] = []
    files: dict[str, tuple[str, float]] = {}
    told: dict[str, str] = {}

    def nodes(self) -> list[engine.Node]:
        return self.there

    def read_dated(self, path: str) -> tuple[str, float] | None:
        return self.files.get(path) if self.there else None


def node(index: int, status: str = "running", code: int = 0) -> engine.Node:
    return engine.Node(index, f"own-node-{index + 1}", f"id{index}", status, code, 1, 1, BORN, "", BORN)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two nodes that train; `told` is what the engine's events say of each, `files` what the volume holds."""
    there = Played("own", {"RUN": "digits", "IMAGE": "image"})
    there.there, there.files = [node(0), node(1)], {}
    told: dict[str, str] = {}

    def docker(*words: str, **_: object) -> str:
        assert words[0] == "events" and words[words.index("--since") + 1] == BORN
        return told.get(next(word for word in words if word.startswith("container=")).partition("=")[2], "")

    def read(volume: str, image: str, path: str) -> tuple[str, float] | None:
        assert (volume, image) == ("own_checkpoints", "image")
        return there.files.get(path)

    monkeypatch.setattr(engine, "docker", docker)
    monkeypatch.setattr(job, "read", read)
    there.told = told
    return there


def wrote(played: Any, summary: dict[str, Any], ago: float = 0) -> None:
    played.files["/checkpoints/digits/summary.json"] = (json.dumps(summary), 1767323045.0 - ago)


def ended(played: Any, *nodes: engine.Node) -> tuple[int, str]:
    """The job's end, after `nodes` are all that is there."""
    followed = job.ClusterJob.of(played)
    played.there = list(nodes)
    followed.wait()
    return followed.result()


def test_a_job_whose_containers_are_there(played: Any) -> None:
    wrote(played, STOPPED)
    code, line = ended(played, node(0, "exited", 143), node(1, "exited", 143))
    assert (code, line) == (143, f"ended with 143 (node 0 143, node 1 143): {SAID}")


def test_a_job_whose_containers_were_removed_has_its_own_code_and_its_summary(played: Any) -> None:
    """As `make compose-down` in another terminal does; before, it was `ended with 0 ()`."""
    wrote(played, STOPPED)
    played.told.update(id0="143\n", id1="137\n143\n")
    assert ended(played) == (143, f"ended with 143 (node 0 143, node 1 143): {SAID}")
    played.there = [node(0), node(1)]
    assert ended(played, node(1, "exited", 7))[0] == 7, "of those that are left their own"


def test_containers_that_go_between_their_end_and_the_summary(
    played: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote(played, STOPPED)
    monkeypatch.setattr(Played, "read_dated", lambda self, path: None)
    code, line = ended(played, node(0, "exited", 143), node(1, "exited", 143))
    assert (code, line) == (143, f"ended with 143 (node 0 143, node 1 143): {SAID}")


def test_removed_nodes_of_which_nothing_is_known_have_not_ended_well(played: Any) -> None:
    lost = "the nodes are removed, and no summary of this job is in the volume; its logs may be: "
    lost += "make compose-get RUN=digits PROJECT=own"
    assert ended(played) == (137, f"ended with 137 (node 0 137, node 1 137); {lost}")
    assert ended(played) == (137, f"ended with 137 (its nodes were removed before they were seen); {lost}")


def test_containers_that_come_later_are_another_jobs(played: Any) -> None:
    """As those of `compose-scale`, which stops and replaces them."""
    played.told.update(id0="143", id1="143")
    code, _ = ended(played, replace(node(0), identity="new"))
    assert code == 143


def test_a_killed_node_that_a_spare_has_replaced_is_no_failure_of_the_job(played: Any) -> None:
    wrote(played, {**STOPPED, "state": "finished", "exit_code": 0, "restarts": 1})

    def end(*codes: int) -> tuple[int, str]:
        played.there = [node(index) for index in range(3)]
        return ended(played, *(node(index, "exited", code) for index, code in enumerate(codes)))

    assert end(0, 137, 0)[0] == 137
    played.variables["TANDEM_SPARES"] = "1"
    code, line = end(0, 137, 0)
    assert code == 0 and "node 1 137" in line and "1 restart," in line
    assert [end(*codes)[0] for codes in ((0, 137, 137), (137, 0, 0), (0, 2, 0))] == [137, 137, 2]


def test_a_summary_that_was_cut_short_counts_as_none(played: Any) -> None:
    played.files["/checkpoints/digits/summary.json"] = ('{"state": "sto', 1767323045.0)
    code, line = ended(played, node(0, "exited", 143), node(1, "exited", 143))
    assert code == 143 and "no summary was written" in line


def test_the_summary_of_an_earlier_job_is_not_this_ones(played: Any) -> None:
    finished = {"state": "finished", "exit_code": 0, "global_step": 500}
    wrote(played, finished, ago=100)
    nodes = [node(0, "exited", 2), node(1, "exited", 2)]
    nothing = "no summary was written, the logs say why: make compose-logs"
    assert ended(played, *nodes) == (2, f"ended with 2 (node 0 2, node 1 2); {nothing}")
    complete = [node(0, "exited"), node(1, "exited")]
    played.there = [node(0), node(1)]
    said = "ended with 0 (node 0 0, node 1 0): finished at step 500"
    assert ended(played, *complete) == (0, said), "a run that was complete writes none"


def test_a_node_that_is_removed_while_it_is_shaped_ends_nothing(
    played: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        played.there = []
        raise engine.ClusterError("no such container")

    monkeypatch.setattr(network, "shape_node", gone)
    object.__setattr__(played, "variables", {**played.variables, "RATE": "1gbit"})
    network.keep_shape(played, {})


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("runs", [True, False])
def test_down_stops_a_job_and_says_how_it_ended_before_it_removes_it(
    played: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    by_hand: bool,
    runs: bool,
) -> None:
    calls: list[str] = []
    after = [node(0, "exited", 143), node(1, "exited", 143)]
    if not runs:
        played.there = after

    def compose(self: engine.Cluster, *words: str, seconds: float = 0) -> str:
        calls.append(words[0])
        if words[0] == "stop":
            played.there = after
            wrote(played, STOPPED)
        else:
            played.there = []
        return ""

    def found(project: str) -> engine.Cluster:
        if by_hand:
            raise engine.ClusterError("there is no cluster own here")
        return played  # type: ignore[no-any-return]

    monkeypatch.setattr(engine.Cluster, "compose", compose)
    monkeypatch.setattr(engine.Cluster, "found", found)
    monkeypatch.setattr(engine.Cluster, "nodes", lambda self: played.there)
    monkeypatch.setattr(engine.Cluster, "read_dated", lambda self, path: played.files.get(path))
    monkeypatch.setattr(cluster, "docker", lambda *words, **options: "")  # the network is gone
    monkeypatch.delenv("RUN", raising=False)
    assert cluster.down(command_line.parsed(["down", "--project", "own"])) == 0
    down = "cluster own is down; volumes kept (VOLUMES=1 removes own_checkpoints and _data)\n"
    stopping = "stopping: every node saves and ends; Ctrl-C kills them\n"
    ending = f"ended with 143 (node 0 143, node 1 143): {SAID}\n"
    assert capsys.readouterr().out == (stopping + ending + down if runs else down)
    assert calls == (["stop", "down"] if runs else ["down"])


def test_a_second_sigterm_is_no_second_interrupt() -> None:
    before = signal.signal(signal.SIGTERM, command_line.stop_once)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
