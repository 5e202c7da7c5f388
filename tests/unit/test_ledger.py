"""Where the wall time of a run went: the parts add up to it, whatever the history."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem import cli
from tandem.bounded_reader import RunFiles
from tandem.errors import ConfigError
from tandem.report.goodput import ledger_of, table
from tandem.report.runs import find_runs
from tandem.telemetry.ledger import (
    FINISHED,
    KILLED,
    LINE_BYTES,
    MOST_LINES,
    PARTS,
    Cost,
    LedgerFile,
    Period,
    account,
    cause_of,
    periods_in,
)
from tandem.telemetry.meter import ACTIVITIES
from tandem.telemetry.metrics import STEP_DURATION_SECONDS, STEP_PHASE_SECONDS, STRAGGLER_EXCESS_SECONDS

SECONDS = st.floats(0, 1e6)
CAUSES = st.sampled_from(["", "rank killed", "node lost", "hang", "stop", "failure", FINISHED])
PERIODS = st.lists(
    st.builds(
        Period,
        launch=st.sampled_from([0.0, 1e6, 2e6]),
        began=SECONDS,
        seconds=st.dictionaries(st.sampled_from(ACTIVITIES), SECONDS),
        first=st.none() | st.integers(0, 1000),
        last=st.integers(0, 1000),
        stalled=SECONDS,
        data=SECONDS,
        stragglers=SECONDS,
        end=CAUSES,
    ),
    max_size=12,
)


@given(PERIODS)
def test_the_parts_add_up_to_the_wall_time_of_any_history(periods: list[Period]) -> None:
    found = account(periods)
    away = sum(
        max(0.0, after.began - before.began - before.length)
        for before, after in zip(periods, periods[1:], strict=False)
        if after.launch != before.launch
    )
    assert set(found.parts) == set(PARTS) and min(found.parts.values()) >= 0
    assert found.wall == pytest.approx(sum(period.length for period in periods) + away)
    assert all(0 <= cost.seconds <= found.wall * (1 + 1e-9) for cost in found.causes.values())


def test_steps_that_later_ranks_repeat_do_not_count_and_their_cause_has_the_restart() -> None:
    first = Period(10, 10, {"startup": 5, "train": 100}, 0, 100, stalled=0, end="rank killed")
    second = Period(10, 115, {"rendezvous": 1, "resume": 2, "train": 50}, 90, 140, stalled=10, end="hang")
    third = Period(10, 168, {"rendezvous": 3, "train": 20}, 140, 160, end="stop")
    fourth = Period(300, 300, {"startup": 6, "train": 40, "eval": 4}, 40, 200, end=FINISHED)
    found = account([first, second, third, fourth])
    # The last launch went back to step 40: all steps after it, of all periods, were repeated.
    assert found.parts["redone"] == pytest.approx(60 + 50 + 20)
    assert found.parts["steps"] == pytest.approx(40 + 40)
    assert found.parts["away"] == pytest.approx(300 - 168 - 23)
    assert found.parts["evaluation"] == 4 and found.parts["start"] == 11
    assert found.causes["rank killed"] == Cost(1, pytest.approx(60 + 3))
    assert found.causes["hang"] == Cost(1, pytest.approx(50 + 3))
    assert found.causes["stop"] == Cost(1, pytest.approx(20 + 109 + 6))
    assert FINISHED not in found.causes


def test_a_launch_that_wrote_no_end_was_killed_and_a_running_one_has_no_cause() -> None:
    killed = Period(0, 0, {"train": 10}, 0, 10)
    running = Period(50, 50, {"startup": 1, "train": 5}, 8, 12, stalled=2)
    found = account([killed, running])
    assert found.causes == {KILLED: Cost(1, pytest.approx(2 + 40 + 1))}
    assert found.parts["redone"] == pytest.approx(2)


def test_steps_of_which_the_agent_did_not_hear_count() -> None:
    """The last beat of the ranks came at step 80, but the next ones resume from step 90."""
    killed = Period(0.0, 0.0, {"train": 10.0}, first=0, last=80, stalled=2.0, end="rank killed")
    after = Period(0.0, 10.0, {"rendezvous": 1.0, "train": 1.0}, first=90, last=95)
    found = account([killed, after])
    assert found.parts["redone"] == pytest.approx(1.0)  # 2 s less ten steps of 0.1 s
    assert found.parts["steps"] == pytest.approx(10.0)
    assert found.causes["rank killed"].seconds == pytest.approx(2.0)


def test_steps_between_the_last_write_and_the_kill_of_a_launch_are_no_absence() -> None:
    killed = Period(0.0, 0.0, {"train": 10.0}, first=0, last=80, stalled=2.0)
    after = Period(50.0, 50.0, {"startup": 3.0, "train": 1.0}, first=130, last=131)
    found = account([killed, after])
    assert found.parts["away"] == pytest.approx(40.0 - 3.0)  # 50 steps of 0.1 s, of which 2 s were known
    assert found.parts["steps"] == pytest.approx(10.0 + 3.0 + 1.0)
    assert found.parts["redone"] == 0 and found.wall == pytest.approx(54.0)
    assert found.causes[KILLED].seconds == pytest.approx(37.0 + 3.0)


def test_rounding_leaves_no_negative_part() -> None:
    training, data = 100930.00262073714, 1.3773475339039578
    assert training - (data + (training - data)) < 0
    found = account([Period(1, 0, {"train": training}, 0, 9, data=data, stragglers=1e6)])
    assert found.parts["steps"] == 0 and min(found.parts.values()) >= 0


def test_waits_are_taken_out_of_the_steps() -> None:
    found = account([Period(0, 0, {"train": 100}, 0, 10, data=30, stragglers=20)])
    assert (found.parts["steps"], found.parts["data"], found.parts["stragglers"]) == (50, 30, 20)


@pytest.mark.parametrize(
    ("kind", "fields", "cause"),
    [
        ("rank_killed", {"rank": 1}, "rank killed"),
        ("recovered", {"cause": "node 1 was lost"}, "node lost"),
        ("recovered", {"cause": "rank 1 on node 0 hung"}, "hang"),
        ("recovered", {"cause": "a node joined"}, "node joined"),
        ("recovered", {"cause": "the ranks lost their connections"}, "connections lost"),
        ("recovered", {"cause": "something new"}, "other"),
        ("checkpoint", {}, None),
    ],
)
def test_the_cause_of_a_restart(kind: str, fields: dict[str, object], cause: str | None) -> None:
    assert cause_of(kind, fields) == cause


def launch(path: Path, began: float, end: str | None) -> LedgerFile:
    """One that trains 10 steps of a second, loses a rank, repeats two steps and trains 8 more."""
    ledger = LedgerFile(path, began, 0.0)
    ledger.enter("rendezvous", 3.0)
    ledger.enter("resume", 4.0)
    ledger.begins(0, 5.0)
    ledger.enter("train", 5.0)
    for step in range(1, 11):
        ledger.finished(step, 5.0 + step)
    ledger.observe([STEP_PHASE_SECONDS.inc(2.0, phase="data"), STEP_PHASE_SECONDS.inc(9.0, phase="forward")])
    ledger.write(12.0)
    ledger.ended(15.5)
    ledger.enter("train", 16.0)
    ledger.begins(8, 16.0)
    ledger.set_cause("rank killed")
    for step in range(9, 17):
        ledger.finished(step, 8.0 + step)
    if end is not None:
        ledger.closed(end, 24.0)
    ledger.write(24.0)
    return ledger


def test_the_file_of_two_launches(tmp_path: Path) -> None:
    path = tmp_path / "goodput.jsonl"
    launch(path, 1000.0, None)
    launch(path, 1100.0, FINISHED)
    lines = path.read_bytes().splitlines(keepends=True)
    assert [len(line) for line in lines] == [LINE_BYTES] * 4
    first, second, _, last = periods_in(map(json.loads, lines))
    assert first == Period(
        1000, 1000, first.seconds, 0, 10, stalled=0.5, data=2, end="rank killed"
    ) and dict(first.seconds) == dict.fromkeys(ACTIVITIES, 0.0) | {
        "startup": 3, "rendezvous": 1, "resume": 1, "train": 10.5,
    }  # fmt: skip
    assert (second.began, second.first, second.last, second.end) == (1015.5, 8, 16, "")
    assert last.end == FINISHED and last.length == pytest.approx(8.5)
    found = ledger_of(RunFiles(tmp_path))
    assert found.wall == pytest.approx(2 * 24 + 76)
    assert found.parts["away"] == pytest.approx(76)


def test_a_slow_first_step_belongs_to_the_start(tmp_path: Path) -> None:
    ledger = LedgerFile(tmp_path / "goodput.jsonl", 1000.0, 0.0)
    ledger.enter("resume", 1.0)
    ledger.enter("train", 5.0)
    ledger.begins(7, 5.0)
    ledger.finished(7, 5.5)  # a heartbeat of the step that was loaded
    ledger.finished(9, 9.0)  # 4 s for two steps, and then half a second for each
    ledger.finished(13, 11.0)
    ledger.finished(14, 12.0)
    ledger.closed(FINISHED, 12.0)
    (period,) = ledger.periods(12.0)
    assert (period.seconds["resume"], period.seconds["train"]) == (4.0 + 3.0, 4.0)
    assert period.length == 12.0 and ledger.due.is_set()


def test_a_torn_line_of_a_killed_launch_is_dropped_and_the_file_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "goodput.jsonl"
    launch(path, 1000.0, None)
    path.write_bytes(path.read_bytes() + b'{"launch": 1')
    launch(path, 1100.0, None)
    assert len(periods_in(map(json.loads, path.read_bytes().splitlines()))) == 4
    path.write_bytes(path.read_bytes()[: 2 * LINE_BYTES] * (MOST_LINES // 2))
    launch(path, 1200.0, None)
    assert path.stat().st_size == (MOST_LINES // 2 + 2) * LINE_BYTES


def test_a_straggler_costs_its_excess_in_each_step_of_the_interval(tmp_path: Path) -> None:
    ledger = LedgerFile(tmp_path / "goodput.jsonl", 0.0, 0.0)
    ledger.observe([STRAGGLER_EXCESS_SECONDS.set(0.5, rank=1, node=0, phase="forward")])
    ledger.observe([STEP_DURATION_SECONDS.observe(1.0, 1.0, 1.0)])
    ledger.observe([STRAGGLER_EXCESS_SECONDS.clear()])
    ledger.observe([STEP_DURATION_SECONDS.observe(1.0)])
    assert ledger.periods(1.0)[-1].stragglers == pytest.approx(1.5)


def test_a_clock_that_goes_back_charges_nothing(tmp_path: Path) -> None:
    ledger = LedgerFile(tmp_path / "goodput.jsonl", 100.0, 50.0)
    ledger.enter("train", 60.0)
    ledger.enter("eval", 40.0)
    assert ledger.periods(61.0)[-1].length == pytest.approx(11.0)
    assert account([Period(2, 500, {"train": 5}), Period(3, 400, {"train": 5})]).parts["away"] == 0


def test_what_a_person_reads(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"task": "digits"}')
    assert "no goodput.jsonl" in table(find_runs(tmp_path), tmp_path)
    launch(tmp_path / "run" / "goodput.jsonl", 1000.0, FINISHED)
    text = table(find_runs(tmp_path), tmp_path)
    assert "24 s, of which" in text and "rank killed, once" in text and "3.0 s" in text


@pytest.mark.parametrize("flag", ["--clean", "--dry-run"])
def test_showing_and_removing_are_two_commands(flag: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="type two commands"):
        cli.run("runs", [str(tmp_path), "--goodput", flag], {})


def test_the_total_has_the_launches_before_this_one_as_well(tmp_path: Path) -> None:
    path = tmp_path / "goodput.jsonl"
    first = LedgerFile(path, 1000.0, 0.0)
    first.enter("train", 10.0)
    first.closed("stop", 30.0)
    first.write(30.0)
    with path.open("ab") as file:
        file.write(b"[1]".ljust(LINE_BYTES - 1) + b"\n" + b"{no JSON".ljust(LINE_BYTES - 1) + b"\n")
    second = LedgerFile(path, 1050.0, 0.0)
    second.enter("train", 5.0)
    assert second.total(15.0).wall == 15, "the volume has not been read yet"
    second.write(15.0)
    found = second.total(16.0)
    assert found.wall == 66, "30 s, 20 s away, 16 s"
    assert found.parts["away"] == 20 and found.parts["start"] == 15
    assert found.causes == {"stop": Cost(1, 45)}
    told = {(name, *labels.values()): value for name, labels, value in found.samples()}
    assert told["tandem_run_seconds", "away"] == 20
    assert told["tandem_restart_cost_seconds", "stop"] == 45
