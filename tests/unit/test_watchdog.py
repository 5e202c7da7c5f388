"""Who is named: the judge of the watchdog, with beats made by hand."""

from dataclasses import replace

from tandem.telemetry.hangs import Beat, judge

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
STUCK = replace(WELL, waiting=True, quiet=11.0)


def test_nobody_is_named_while_somebody_computes_within_its_limit() -> None:
    assert judge([]) is None
    assert judge([WELL, replace(STUCK, rank=1)]) is None
    slow_save = replace(WELL, phase="checkpoint", quiet=300.0, limit=1800.0)
    assert judge([slow_save, replace(STUCK, rank=1)]) is None
    assert judge([replace(WELL, quiet=9.0, waiting=True), replace(STUCK, rank=1)]) is None


def test_a_rank_that_cannot_be_heard_comes_first() -> None:
    halted = replace(WELL, rank=2, node=1, silent=10.5, halted=True)
    alarm = judge([STUCK, replace(STUCK, rank=1, waiting=False), halted])
    assert alarm is not None and (alarm.rank, alarm.node) == (2, 1)
    assert "cannot be heard since 10.5 s" in alarm.text and "step 7" in alarm.text
    assert judge([WELL, replace(halted, silent=9.0)]) is None


def test_the_one_outside_a_collective_is_named_once_it_is_overdue() -> None:
    alarm = judge([STUCK, replace(STUCK, rank=1), replace(WELL, rank=2, phase="data", quiet=10.1)])
    assert alarm is not None and (alarm.rank, alarm.phase) == (2, "data")


def test_of_many_in_collectives_the_one_out_of_line_is_named() -> None:
    ahead, behind = replace(STUCK, rank=2, step=8, phase="forward"), replace(STUCK, rank=1, step=6)
    assert getattr(judge([STUCK, replace(STUCK, rank=1), ahead]), "rank", None) == 2
    assert getattr(judge([STUCK, behind, replace(STUCK, rank=2)]), "rank", None) == 1
    assert getattr(judge([STUCK, replace(ahead, rank=1)]), "rank", None) == 1, "of two, the one ahead"


def test_all_may_wait_as_long_as_a_start_takes() -> None:
    starting = replace(STUCK, phase="rendezvous", quiet=85.0, limit=1800.0, hang=60.0)
    assert judge([starting]) is None
    assert judge([starting, replace(starting, rank=1)]) is None
