"""Which node has which place of the world when nodes come, are lost and come back (`--spares`)."""

import pytest

from tandem.launch.places import (
    COMPUTES_WRONGLY,
    NodeReport,
    PlaceOwner,
    PlaceTable,
    from_text,
    report_from,
    to_text,
)

SILENCE, LONG_SILENCE, PATIENCE = 1.0, 5.0, 10.0


class Job:
    """Nodes that report to a table, on a clock that the test moves."""

    def __init__(self, nodes: int = 3, spares: int = 1) -> None:
        self.table = PlaceTable(nodes, spares, SILENCE, LONG_SILENCE, PATIENCE, 0.0)
        self.now, self.beat = 0.0, 0
        self.live: dict[int, str] = {}
        self.has_run: set[str] = set()
        self.claims: dict[int, int] = {}

    def starts(self, *nodes: int, token: str = "first") -> None:
        for node in nodes:
            self.live[node] = f"{token} start of {node}"

    def passes(self, seconds: float, is_interrupted: bool = True, is_training: bool = False) -> list[str]:
        """The changes within `seconds`, as "place: node"."""
        found = []
        ends = self.now + seconds
        while self.now < ends:
            self.now += 0.1
            self.beat += 1
            for node, token in self.live.items():
                place = self.places().get(node, self.claims.get(node, -1))
                waits = node not in self.places()
                report = NodeReport(self.beat, token, place, waits, token in self.has_run)
                self.table.hear(node, report, self.now)
            changes = self.table.decide(self.now, is_interrupted, is_training)
            found += [f"{change.place}: {change.node}" for change in changes]
            self.has_run |= {self.live[change.node] for change in changes}
        return found

    def places(self) -> dict[int, int]:
        """{node: place} of the nodes that know of their place."""
        holders = self.table.holders.items()
        return {node: place for place, (node, token) in holders if self.live.get(node) == token}


@pytest.fixture
def job() -> Job:
    found = Job()
    found.starts(1, 2, 3)
    assert found.passes(1) == ["1: 1", "2: 2"] and found.table.waiting(found.now) == [3]
    return found


def test_nodes_have_the_places_of_their_numbers_whatever_the_order_in_which_they_come() -> None:
    job = Job()
    job.starts(3, 2)
    assert job.passes(PATIENCE - 1) == ["2: 2"]
    job.starts(1)
    assert job.passes(5) == ["1: 1"]


def test_a_spare_begins_in_the_place_of_a_node_that_does_not_come() -> None:
    job = Job()
    job.starts(2, 3)
    assert job.passes(PATIENCE + 1) == ["2: 2", "1: 3"]
    job.starts(1)
    assert not job.passes(20) and job.table.waiting(job.now) == [1]


def test_a_node_that_computes_wrongly_loses_its_place_for_good(job: Job) -> None:
    job.table.charge(2, COMPUTES_WRONGLY)
    assert not job.passes(5, is_interrupted=False, is_training=True)
    assert job.passes(2) == ["2: 3"]
    assert not job.table.waiting(job.now), "it is no spare"
    del job.live[3]
    assert not job.passes(20), "rather no node than a wrong one"
    job.starts(3, token="second")
    assert job.passes(2) == ["2: 3"]


def test_a_silent_node_loses_its_place_and_becomes_a_spare(job: Job) -> None:
    token = job.live.pop(2)
    assert job.passes(2) == ["2: 3"]
    assert job.table.failures(2) == 1
    job.live[2] = token  # it was only frozen
    assert not job.passes(20)
    del job.live[3]
    assert job.passes(2) == ["2: 2"]


def test_a_restarted_node_counts_as_lost_at_once(job: Job) -> None:
    job.starts(1, token="second")
    assert job.passes(0.3) == ["1: 3"]
    assert job.table.waiting(job.now) == [1]
    job.starts(3, token="second")
    assert job.passes(0.3) == ["1: 1"]


def test_without_a_spare_a_place_waits_for_its_node(job: Job) -> None:
    job.live.clear()
    assert not job.passes(20)
    job.starts(1, token="second")
    assert job.passes(1) == ["1: 1"] and job.table.failures(1) == 1


def test_a_silent_agent_whose_ranks_train_keeps_its_place(job: Job) -> None:
    del job.live[1]
    assert not job.passes(20, is_interrupted=False, is_training=True)
    assert job.passes(1, is_interrupted=False) == ["1: 3"]


def test_a_host_that_vanishes_during_a_step_is_lost_after_the_long_silence(job: Job) -> None:
    del job.live[1]
    assert not job.passes(LONG_SILENCE - 0.5, is_interrupted=False)
    assert job.passes(1, is_interrupted=False) == ["1: 3"]


def test_a_node_is_left_out_after_three_failures_only_between_generations_and_for_a_better_one(
    job: Job,
) -> None:
    job.table.charge(1, 2)
    assert not job.passes(1)
    job.table.charge(1, 3)
    assert not job.passes(1, is_interrupted=False)
    job.table.charge(3, 3)
    assert not job.passes(1), "the spare is no better"
    better = Job(spares=2)
    better.starts(1, 2, 3, 4)
    better.passes(1)
    better.table.charge(1, 3)
    assert better.passes(1) == ["1: 3"]
    assert better.table.waiting(better.now) == [4, 1], "it is the last resort"
    del better.live[3], better.live[4]
    assert better.passes(2) == ["1: 1"]


def test_after_a_restart_of_node_0_those_that_trained_keep_their_places() -> None:
    job = Job()
    job.starts(1, 2)
    job.starts(3)
    job.has_run, job.claims = {job.live[3], job.live[2]}, {3: 1, 2: 2}
    late = job.live.pop(3)
    assert job.passes(0.1) == ["1: 1", "2: 2"]
    job.has_run.discard(job.live[1])  # no generation has begun
    job.live[3] = late
    assert job.passes(0.2) == ["1: 3"]
    assert job.table.waiting(job.now) == [1] and job.table.failures(1) == 0


def test_what_is_in_the_store_is_checked() -> None:
    holders = {1: PlaceOwner(3, "a"), 2: PlaceOwner(2, "b")}
    assert from_text(to_text(holders).encode()) == holders
    for text in (b"", b"[]", b"3", b'{"1": 2}', b'{"x": [1, "a"]}', b"\xff", b"[" * 100_000):
        with pytest.raises(ValueError):
            from_text(text)
        with pytest.raises(ValueError):
            report_from(text)
