"""Nodes that come late to an elastic job, and nodes that leave it."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tandem.launch.generation_sync import Departures
from tandem.launch.rendezvous_state import LastCall
from tandem.platforms.detection import Placement
from tandem.timeouts import FIRST_CALL_SECONDS, LAST_CALL_SECONDS

PLACEMENT = Placement("by-hand", 3, 1, 1, "127.0.0.1", 29500, elastic=(2, 3))


def test_a_job_settles_once() -> None:
    last_call = LastCall(60)
    assert last_call.join == timedelta(seconds=60)
    assert last_call.last_call == timedelta(seconds=FIRST_CALL_SECONDS)
    last_call.has_begun()
    assert last_call.last_call == timedelta(seconds=LAST_CALL_SECONDS)


def test_nodes_leave_as_long_as_enough_stay() -> None:
    departures = Departures(PLACEMENT, TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    departures.begin_generation("generation/0.a", 3)
    assert not departures.others_continue(), "nobody leaves"
    departures.leaves()
    assert departures.others_continue() and departures.can_leave()
    departures.leaves()
    assert not departures.others_continue(), "one of three is below MIN"


def test_node_0_has_the_store_and_cannot_leave() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    departures = Departures(replace(PLACEMENT, node_rank=0), store)
    departures.begin_generation("generation/0.a", 3)
    departures.leaves()
    assert departures.others_continue() and not departures.can_leave()


def test_a_node_of_a_fixed_job_asks_nobody_when_it_stops() -> None:
    """Node 0 may be frozen: a stop waited for its store before the ranks were told."""
    store: Any = None  # whoever asks it raises
    departures = Departures(replace(PLACEMENT, elastic=None), store)
    departures.begin_generation("generation/0.a", 3)
    departures.leaves()
    assert not departures.others_continue()
