"""Which rank is named as hung, with beats made by hand; and how nodes come to know it."""

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tandem import running_clock
from tandem.launch import watchdog
from tandem.launch.rendezvous import MasterProbe
from tandem.launch.watchdog import Watchdog
from tandem.telemetry import metrics
from tandem.telemetry.hangs import NOTHING_BEFORE, Alarm, Beat, find_hung_rank
from tandem.telemetry.messages import Heartbeat
from tandem.telemetry.registry import Registry

WELL = Beat(
    rank=0,
    node=0,
    node_name="here",
    step=7,
    activity="train",
    trained=True,
    phase="backward",
    quiet=0.1,
    silent=0.1,
    limit=10.0,
    hang=10.0,
    waiting=False,
    halted=False,
)
STUCK = replace(WELL, waiting=True, quiet=11.0, idle=11.0)


def test_nobody_is_named_while_somebody_computes_within_its_limit() -> None:
    assert find_hung_rank([]) is None
    assert find_hung_rank([WELL, replace(STUCK, rank=1)]) is None
    slow_save = replace(WELL, phase="checkpoint", quiet=300.0, limit=1800.0)
    assert find_hung_rank([slow_save, replace(STUCK, rank=1)]) is None
    assert find_hung_rank([replace(WELL, quiet=9.0, waiting=True), replace(STUCK, rank=1)]) is None


def test_a_rank_that_cannot_be_heard_comes_first() -> None:
    halted = replace(WELL, rank=2, node=1, silent=10.5, halted=True)
    alarm = find_hung_rank([STUCK, replace(STUCK, rank=1, waiting=False), halted])
    assert alarm is not None and (alarm.rank, alarm.node) == (2, 1)
    assert "no heartbeat for 10.5 s" in alarm.text and "step 7" in alarm.text
    assert find_hung_rank([WELL, replace(halted, silent=9.0)]) is None


def test_the_one_outside_a_collective_is_named_once_it_is_overdue() -> None:
    alarm = find_hung_rank([STUCK, replace(STUCK, rank=1), replace(WELL, rank=2, phase="data", quiet=10.1)])
    assert alarm is not None and (alarm.rank, alarm.phase) == (2, "data")


def test_of_many_in_collectives_the_one_out_of_line_is_named() -> None:
    ahead, behind = replace(STUCK, rank=2, step=8, phase="forward"), replace(STUCK, rank=1, step=6)
    assert getattr(find_hung_rank([STUCK, replace(STUCK, rank=1), ahead]), "rank", None) == 2
    assert getattr(find_hung_rank([STUCK, behind, replace(STUCK, rank=2)]), "rank", None) == 1
    found = find_hung_rank([STUCK, replace(ahead, rank=1)])
    assert getattr(found, "rank", None) == 1, "of two, the one ahead"


def test_all_may_wait_as_long_as_a_start_takes() -> None:
    starting = replace(STUCK, phase="rendezvous", quiet=85.0, limit=1800.0, hang=60.0)
    assert find_hung_rank([starting]) is None
    assert find_hung_rank([starting, replace(starting, rank=1)]) is None


IDLE = replace(WELL, rank=1, phase="forward", quiet=70.0, idle=60.0, idle_limit=180.0, limit=1800.0)


def test_long_work_is_told_from_idling_and_the_line_says_what_to_set() -> None:
    waits = replace(STUCK, idle=70.0, idle_limit=180.0, limit=1800.0)
    assert find_hung_rank([waits, IDLE]) is None
    assert find_hung_rank([waits, replace(IDLE, quiet=900.0, idle=0.2)]) is None, "it computes"
    alarm = find_hung_rank([waits, replace(IDLE, quiet=900.0, idle=181.0)])
    assert alarm is not None and (alarm.rank, alarm.seconds) == (1, 181.0)
    assert "--hang-timeout 370" in alarm.text
    starting = find_hung_rank([replace(IDLE, trained=False, quiet=1801.0)])
    assert starting is not None and "--phase-timeout" in starting.text


def test_all_in_one_place_have_minutes_and_in_different_ones_seconds() -> None:
    waits = replace(STUCK, idle=11.0, idle_limit=180.0, limit=1800.0)
    assert find_hung_rank([waits, replace(waits, rank=1)]) is None
    assert find_hung_rank([replace(waits, idle=181.0), replace(waits, rank=1, idle=181.0)]) is not None
    assert getattr(find_hung_rank([waits, replace(waits, rank=1, step=8)]), "rank", None) == 1
    lines = replace(waits, phase="train.py:7"), replace(waits, rank=1, phase="train.py:9")
    assert find_hung_rank(lines) is not None, "a script's"


def hung(**fields: object) -> Alarm:
    return replace(Alarm(1, 0, "forward", 7, 180.0, "hang"), **fields)  # type: ignore[arg-type]


def test_the_same_hang_is_known_sooner_and_said_to_be_the_same() -> None:
    first_step = replace(IDLE, trained=False, idle=31.0, idle_limit=1800.0, hang=60.0)
    waits = replace(STUCK, trained=False, idle=31.0, idle_limit=1800.0, limit=1800.0, hang=60.0)
    past = NOTHING_BEFORE.after(hung(), [])
    assert find_hung_rank([waits, first_step]) is None
    alarm = find_hung_rank([waits, first_step], past)
    assert alarm is not None and alarm.again and alarm.rank == 1
    together = NOTHING_BEFORE.after(hung(together=True, step=8), [])
    both = find_hung_rank([waits, replace(waits, rank=1)], together)
    assert both is not None and both.again, "all wait, and another is named"
    for other in (hung(step=6), hung(rank=2), hung(halted=True)):
        assert find_hung_rank([waits, first_step], NOTHING_BEFORE.after(other, [])) is None
    assert find_hung_rank([waits, replace(first_step, hang=120.0)], past) is None, "--hang-timeout 120"
    at_line = replace(first_step, phase="train.py:7", step=0, activity="startup")
    alarm = find_hung_rank([waits, at_line], NOTHING_BEFORE.after(hung(phase="train.py:7", step=30), []))
    assert alarm is not None and alarm.again, "a script counts from 0 again"


def test_limits_that_steps_gave_last_into_the_next_generation() -> None:
    past = NOTHING_BEFORE.after(None, [replace(IDLE, idle_limit=400.0)]).after(hung(halted=True), [])
    late = replace(IDLE, idle=300.0)
    assert find_hung_rank([late]) is not None and find_hung_rank([late], past) is None
    asked = replace(late, limit=10.0, idle_limit=10.0)
    assert find_hung_rank([asked], past) is not None, "--hang-timeout 10"


def test_an_agent_that_is_silent_while_ranks_get_on_is_no_hang() -> None:
    """Its ranks take part in those steps; a link that is down lets nobody finish one."""
    dog = Watchdog(0, "here", 0, lambda: pytest.fail("not started"), Registry())
    dog.begin_generation("generation/1", {0: os.getpid()}, range(2))
    heard = Heartbeat(0, 7, "train", "backward", 0.0, 1800.0, 10.0, trained=True, waiting=False)
    remote = replace(WELL, rank=1, node=1)
    dog._nodes[1] = watchdog._Heard([remote], 1, running_clock.now() - 30)
    dog.record_heartbeat(heard)
    dog.record_heartbeat(replace(heard, step=8))
    dog._look(running_clock.now())
    assert dog.alarm is None and dog._unheard == {1}
    dog._look(running_clock.now() + 11)
    assert dog.alarm is not None and (dog.alarm.rank, dog.alarm.halted) == (1, True)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ports to which connections were cut."""
    ports = list[int]()
    monkeypatch.setattr(watchdog, "cut_connections", ports.append)
    return ports


def test_a_node_that_cannot_reach_node_0_keeps_its_connections_while_its_ranks_get_on(
    cut: list[int],
) -> None:
    dog = Watchdog(1, "there", 5, lambda: pytest.fail("not started"), Registry())
    dog.begin_generation("generation/1", {1: os.getpid()}, range(2))
    dog._last_exchange = running_clock.now() - 30
    heard = Heartbeat(1, 7, "train", "backward", 0.0, 1800.0, 10.0, trained=True, waiting=False)
    dog.record_heartbeat(heard)
    dog.record_heartbeat(replace(heard, step=8))
    dog._look(running_clock.now())
    assert cut == [] and dog._unheard == {0}
    dog._look(running_clock.now() + 11)
    assert cut == [5]


def test_a_node_waits_longer_for_a_frozen_agent_of_node_0_than_for_a_lost_one(cut: list[int]) -> None:
    """A sharded save waits for node 0's agent, so no rank finishes a step while that is stopped."""
    dog = Watchdog(1, "there", 5, lambda: pytest.fail("not started"), Registry())
    dog.is_master_frozen = lambda: True
    dog.begin_generation("generation/1", {1: os.getpid()}, range(2))
    dog.record_heartbeat(Heartbeat(1, 7, "train", "backward", 0.0, 1800.0, 10.0, trained=True, waiting=True))
    dog._look(running_clock.now() + 30)
    assert cut == [] and dog._unheard == {0}
    dog._look(running_clock.now() + 61)
    assert cut == [5]


def probe_of(port: int, patience: float) -> MasterProbe:
    def connect() -> TCPStore:
        return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))

    return MasterProbe("127.0.0.1", port, connect, patience)


@pytest.mark.slow
def test_a_port_that_accepts_and_never_answers_is_that_of_a_frozen_agent(free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        wait_until(probe_of(free_port, 0.5).is_frozen)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for port in (free_port, server.port):  # nothing listens; the store answers
        probe = probe_of(port, 0.0)
        for _ in range(3):  # each call but the first returns what a whole probe found
            assert not probe.is_frozen()
            assert probe._thread is not None
            probe._thread.join(60)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_nodes_agree_on_a_hang_and_node_0_shows_what_node_1_knows() -> None:
    """The exchange itself, through a real store; the ranks' processes are this one."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connect() -> TCPStore:
        return TCPStore("127.0.0.1", server.port, is_master=False)

    registries = [Registry(node=node) for node in (0, 1)]
    dogs = [Watchdog(node, "here", server.port, connect, registries[node]) for node in (0, 1)]
    registries[1].apply([metrics.RANK_MEMORY_BYTES.set(5, rank=1)])
    heard = Heartbeat(0, 7, "train", "backward", 0.0, 60.0, 60.0, trained=True, waiting=True)
    try:
        for node, dog in enumerate(dogs):
            dog.start()
            dog.begin_generation("world/a", {node: os.getpid()}, [0, 1])
        dogs[0].record_heartbeat(heard)
        dogs[1].record_heartbeat(replace(heard, rank=1, phase="data", quiet=61.0, waiting=False))
        for dog in dogs:
            wait_until(lambda dog=dog: dog.alarm)
            named = dog.alarm
            assert named is not None and (named.rank, named.node, named.phase) == (1, 1, "data")
        value = registries[0].registry.get_sample_value
        wait_until(lambda: value("tandem_rank_memory_bytes", {"rank": "1", "node": "1"}) == 5)
        registries[1].apply([metrics.DATA_ERRORS.inc(reason="OSError")])
        dogs[1].end_generation(server)
    finally:
        dogs[1].close(None)
        dogs[0].close(server)
    assert value("tandem_data_errors_total", {"reason": "OSError", "node": "1"}) == 1, "its last words"


def test_what_is_no_heartbeat_ends_no_thread_and_hides_nobody_else() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dog = Watchdog(
        0, "here", server.port, lambda: TCPStore("127.0.0.1", server.port, is_master=False), Registry(node=0)
    )
    late = replace(WELL, rank=2, node=2, phase="data", quiet=61.0, limit=60.0, hang=60.0)
    odd: list[object] = [[], 5, "x", {"number": 1}, {"number": "a", "beats": [], "time": 0.0}]
    odd += ["deep"]
    odd += [{"number": 1, "beats": [each], "time": 0.0} for each in ({}, vars(late) | {"quiet": "long"}, [1])]
    try:
        dog.start()
        dog.begin_generation("world/a", {}, [0, 1, 2])
        for words in odd:
            server.set("world/a/pulse/1", "[" * 100_000 if words == "deep" else json.dumps(words))
            time.sleep(0.05 if words != "deep" else 0.5)
        server.set("world/a/pulse/1", b"\xff{")
        server.set("world/a/pulse/2", json.dumps({"number": 1, "beats": [vars(late)], "time": time.time()}))
        wait_until(lambda: dog.alarm)
        assert dog.alarm is not None and dog.alarm.rank == 2
    finally:
        dog.close(None)


@pytest.mark.parametrize("words", [b"{", b"\xff", b"5", b"{}", b"[" * 100_000, b'{"rank": "0"}'])
def test_an_alarm_that_is_none_is_no_silence_of_node_0(words: bytes) -> None:
    """The exchange failed at each look, and the node took the store for lost and cut its connections."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dog = Watchdog(
        1, "here", server.port, lambda: TCPStore("127.0.0.1", server.port, is_master=False), Registry(node=1)
    )
    server.set("world/a/alarm", words)
    try:
        dog.start()
        dog.begin_generation("world/a", {}, [0, 1])
        for _ in range(2):  # it goes on saying what it has to say
            server.delete_key("world/a/pulse/1")
            wait_until(lambda: server.check(["world/a/pulse/1"]))
        wait_until(lambda: dog._last_exchange)
        assert dog.alarm is None
    finally:
        dog.close(None)


def test_the_silence_of_a_store_that_is_gone_is_none_of_the_next_generations(
    cut: list[int], free_port: int
) -> None:
    """The node of the store was back, all had met, and 10 s after its end the new connections were cut."""
    dog = Watchdog(1, "there", free_port, lambda: pytest.fail("not started"), Registry())
    dog._last_exchange = running_clock.now() - 60
    dog.begin_generation("generation/2", {}, range(2))
    dog._look(running_clock.now() + 5)
    assert cut == []
    dog._look(running_clock.now() + 15)
    assert cut == [free_port], "its own silence counts"
