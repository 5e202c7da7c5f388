"""What a killed rank costs, told to people on node 0: by whoever has seen the signal, by way of the store."""

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tandem.checkpoint.decision import ResumeDecision
from tandem.distributed.position import Grant, Position
from tandem.distributed.restart_notes import OutOfMemory, write
from tandem.launch import agent
from tandem.launch.recovery import Recovery
from tandem.launch.rendezvous import StoreLostError
from tandem.platforms.detection import Placement
from tandem.telemetry.messages import RunStarted

TWO = [{0: Position(rank=node, world_size=2, node_rank=node, nodes=2)} for node in range(2)]


class Told:
    """A node's view as `Recovery` uses it; `plan` where the ranks are a task's."""

    def __init__(self, plan: RunStarted | None) -> None:
        self.plan, self.events = plan, list[dict[str, Any]]()

    def rank_0_step(self) -> int:
        return 12

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})


def two_nodes(plan: RunStarted | None = None) -> tuple[list[Recovery], Told]:
    store, view = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), Told(plan)

    def on(node: int) -> Recovery:
        placement = Placement("by-hand", 2, node, 1, "127.0.0.1", 29500)
        return Recovery(SimpleNamespace(placement=placement, view=view), store)  # type: ignore[arg-type]

    return [on(0), on(1)], view


def test_a_rank_that_was_killed_elsewhere_is_named_when_its_node_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (first, second), _ = two_nodes()
    with caplog.at_level(logging.INFO, "tandem.agent"):
        second.failed(TWO[1], "generation/0", {0: 137})
        first.failed(TWO[0], "generation/0", {0: None})
        first.interrupted(2)
    assert caplog.messages == ["rank 1 on node 1 was killed (SIGKILL); restarting all ranks (generation 2)"]


def test_a_node_that_is_new_names_nobody(caplog: pytest.LogCaptureFixture) -> None:
    (first, second), view = two_nodes()
    with caplog.at_level(logging.INFO, "tandem.agent"):
        second.failed(TWO[1], "generation/0", {0: None})
        first.failed(TWO[0], "generation/0", {0: None})
        first.interrupted(2)
        first.report_first_step(3)
    joined, again = caplog.messages
    assert joined == "a node wants to join; restarting all ranks (generation 2)"
    assert re.fullmatch(r"a node joined; training again after [\d.]+ \w+", again), again
    assert [(event["kind"], event["cause"]) for event in view.events] == [("recovered", "a node joined")]


@pytest.mark.parametrize(
    ("here", "there", "why", "cause"),
    [
        ({0: None}, {0: None}, "rank 1 on node 1 hung", "rank 1 on node 1 hung"),
        ({0: None}, None, "", "node 1 was lost"),
        ({0: 200}, None, "", "node 1 was lost"),
        ({0: 200}, {0: 200}, "", "the ranks lost their connections"),
        ({0: 1}, {0: 200}, "rank 0 on node 0 ended with 1", "rank 0 on node 0 ended with 1"),
    ],
)
def test_without_a_killed_rank_the_line_has_another_cause(
    here: dict[int, int | None], there: dict[int, int | None] | None, why: str, cause: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    (first, second), view = two_nodes()
    if there is not None:
        second.failed(TWO[1], "generation/0", there)
    first.failed(TWO[0], "generation/0", here, why=why)
    first.report_first_step(2)
    (line,), (event,) = caplog.messages, view.events
    assert line.startswith(f"{cause}; training again after ") and event["cause"] == cause


def test_ranks_that_were_aborted_after_another_ran_out_of_memory_are_not_the_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, prefix = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), "generation/0.ab"
    view = Told(None)
    placement = Placement("by-hand", 1, 0, 2, "127.0.0.1", 29500)
    recovery = Recovery(SimpleNamespace(placement=placement, view=view), store)  # type: ignore[arg-type]
    ranks = {n: Position(rank=n, local_rank=n, world_size=2) for n in range(2)}
    fresh = ResumeDecision("fresh")
    assert recovery.requested(prefix) == ""
    assert recovery.with_smaller_batch(fresh) == fresh
    write(store, OutOfMemory(prefix, 1, 0, 8, 4))
    recovery.failed(ranks, prefix, {0: 143, 1: 143})
    assert recovery.request == ""
    recovery.failed(ranks, prefix, {0: 1, 1: 200})
    assert recovery.request == ""
    recovery.failed(ranks, prefix, {0: 134, 1: 200}, aborted={0})
    why = recovery.request
    recovery.report_first_step(1)
    (event,) = view.events
    assert event["kind"] == "recovered" and event["cause"] == why
    assert why.startswith("rank 1 on node 0 ran out of memory") and why in caplog.messages[0]
    assert recovery.requested("generation/1.cd") == ""
    assert recovery.with_smaller_batch(fresh).micro_batch == 4


@pytest.mark.parametrize(("plan", "lost"), [(None, None), (RunStarted(10, 100, 100), 2)])
def test_steps_lost_are_said_of_a_task_whose_steps_are_known(
    plan: RunStarted | None, lost: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A script was said to have lost none, whatever it does again."""
    (first, _), view = two_nodes(plan)
    first.failed(TWO[0], "generation/0", {0: 137})
    first.report_first_step(2)
    (line,), (event,) = caplog.messages, view.events
    assert line.startswith("rank 0 on node 0 was killed (SIGKILL); training again after ")
    assert line.endswith(f", {lost} steps lost") == (lost is not None) == ("lost" in line)
    assert event.get("steps_lost") == lost and event["signal"] == "SIGKILL"


@pytest.mark.parametrize(
    ("here", "aborted", "there", "theirs", "blames_others"),
    [
        (134, {0}, 137, set(), True),  # NCCL's watchdog, after a rank of the other node was killed
        (134, {0}, 134, set(), True),  # ... or its GPU has failed: it exits with that number
        (134, {0}, 134, {0}, False),  # nobody knows which of two aborts came first
        (134, {0}, None, set(), False),  # a bug aborts it
        (134, set(), 137, set(), False),  # this node's GPU has failed
        (139, set(), 137, set(), False),
    ],
)
def test_an_abort_after_a_kill_elsewhere_is_no_incident(
    here: int, aborted: set[int], there: int | None, theirs: set[int], blames_others: bool,
) -> None:  # fmt: skip
    (first, second), _ = two_nodes()
    second.failed(TWO[1], "generation/0", {0: there}, theirs)
    first.failed(TWO[0], "generation/0", {0: here}, aborted)
    assert first.has_lost_others(seconds=0.1) == blames_others


def test_a_failed_gpu_is_not_called_a_kill(caplog: pytest.LogCaptureFixture) -> None:
    (first, second), _ = two_nodes()
    first.failed(TWO[0], "generation/0", {0: 134}, {0})
    second.failed(TWO[1], "generation/0", {0: 134})
    first.report_first_step(2)
    assert "the GPU of rank 1 on node 1 failed" in caplog.text and "rank 0" not in caplog.text


def test_a_recovery_that_needs_another_rendezvous_is_still_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may leave a rendezvous that it has just joined, and the first node then connects once more."""
    store, view = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), Told(None)
    node = SimpleNamespace(
        placement=Placement("by-hand", 2, 0, 1, "127.0.0.1", 29500),
        view=view,
        config=SimpleNamespace(max_restarts=0, master_timeout=1.0),
        endpoint=SimpleNamespace(join=lambda patience, stop: store),
        stop=None,
        work=None,
        resume=None,
        grant=lambda restart, resume: Grant(),
        workers=SimpleNamespace(kill=lambda: None),
    )
    connections = []

    class Connected:
        def __init__(self, *given: Any) -> None:
            connections.append(self)
            self.recovery = given[-1]

        def run_generations(self) -> tuple[int, str]:
            if len(connections) == 1:
                self.recovery.failed(TWO[0], "generation/0", {0: 200})
                raise StoreLostError("the rendezvous started with 1 of 2 nodes")
            self.recovery.report_first_step(2)
            return 0, ""

        def abandon(self) -> None:
            pass

        def leave(self, code: int, reason: str) -> bool:
            return False

    monkeypatch.setattr(agent, "NodeAgent", Connected)
    monkeypatch.setattr(agent, "is_admitted", lambda *_, **__: True)
    watchdog, places = SimpleNamespace(has_trained=True), SimpleNamespace(wait_for_place=lambda *_: node)
    report = agent._run_connections(node, watchdog, store, places)  # type: ignore[arg-type]
    assert report.code == 0 and len(connections) == 2
    assert [event["kind"] for event in view.events] == ["recovered"]
