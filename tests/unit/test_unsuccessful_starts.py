"""Starts that save nothing new are counted, waited for longer and longer, and at last given up."""

import json
from pathlib import Path

import pytest

from tandem.checkpoint.store import CheckpointStore
from tandem.errors import CrashLoopError
from tandem.layout import STARTS
from tandem.run.crash_loop import CrashLoop, Record, backoff_seconds
from tandem.run.directory import RunDir
from tandem.timeouts import STEADY_SECONDS


def crash_loop(run: Path, steady: float = STEADY_SECONDS, wait: float = 0.0) -> CrashLoop:
    return CrashLoop(RunDir(run), steady=steady, backoff=lambda starts: wait)


def begin(run: Path, allowed: int = 3, steady: float = STEADY_SECONDS) -> CrashLoop:
    starts = crash_loop(run, steady)
    starts.begin(allowed, lambda: False)
    return starts


def counted(run: Path) -> Record:
    path = run / STARTS
    return Record.parse(path.read_bytes() if path.exists() else None)


def test_killed_starts_are_given_up_with_the_reason_and_a_person_may_try_again(tmp_path: Path) -> None:
    for number in (1, 2):
        begin(tmp_path)._timer.cancel()  # killed: it has no end
        assert counted(tmp_path) == Record(number, 0, "")
    begin(tmp_path).end(200, "the restart budget (--max-restarts 0) is spent", generations=1)
    with pytest.raises(CrashLoopError) as given_up:
        begin(tmp_path)
    line = str(given_up.value)
    assert given_up.value.exit_code == 1 and "\n" not in line
    assert line.startswith(
        "3 starts in a row have saved nothing new after step 0; the last one: code 200, the"
    )
    assert "--max-crash-loops" in line
    begin(tmp_path)._timer.cancel()
    assert counted(tmp_path).starts == 1


@pytest.mark.parametrize("code", [0, 1, 2, 143])
def test_an_end_that_no_platform_mends_counts_for_nothing(tmp_path: Path, code: int) -> None:
    begin(tmp_path)._timer.cancel()
    begin(tmp_path).end(code, "", generations=1)
    assert not (tmp_path / STARTS).exists()


def test_a_start_that_waited_in_vain_for_others_does_not_count(tmp_path: Path) -> None:
    begin(tmp_path).end(200, "killed twice", generations=2)
    for _ in range(5):
        begin(tmp_path).end(200, "not all of 3 nodes joined within 300 s", generations=0)
    assert counted(tmp_path) == Record(1, 0, "code 200, killed twice")


def test_a_new_checkpoint_begins_the_count_anew(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for _ in range(3):
        begin(tmp_path).end(137, "killed", generations=1)
    store.save(40, b"x", {})
    begin(tmp_path).end(137, "killed", generations=1)
    assert counted(tmp_path) == Record(1, 40, "code 137, killed")
    for _ in range(2):
        begin(tmp_path).end(137, "killed", generations=1)
    with pytest.raises(CrashLoopError, match="after step 40"):
        begin(tmp_path)


def test_a_start_that_lives_long_is_no_crash_that_repeats(tmp_path: Path) -> None:
    starts = begin(tmp_path, steady=0.01)
    starts._timer.join(30)
    assert not (tmp_path / STARTS).exists()


def test_a_start_that_was_steady_and_then_ends_is_counted_as_the_first(tmp_path: Path) -> None:
    """The starts before the steady one were counted again: the run was given up too early."""
    begin(tmp_path).end(200, "a hang", 1)
    begin(tmp_path).end(200, "a hang", 1)
    steady = begin(tmp_path, steady=0.01)
    steady._timer.join(30)
    steady.end(200, "a hang", 1)
    assert counted(tmp_path).starts == 1


def test_the_wait_grows_and_has_an_end() -> None:
    waits = [backoff_seconds(starts) for starts in range(10)]
    assert waits == [0, 0, 0, 5, 10, 20, 40, 80, 120, 120]
    assert backoff_seconds(10**6) == 120


def test_a_stop_ends_the_wait(tmp_path: Path) -> None:
    (tmp_path / STARTS).write_text(json.dumps({"starts": 3, "step": 0, "reason": ""}))
    starts = crash_loop(tmp_path, wait=1e6)
    starts.begin(10, lambda: True)
    starts.end(137, "stopped", generations=0)
    assert counted(tmp_path).starts == 3


def test_the_count_of_a_run_that_was_taken_over_is_its_new_owners(tmp_path: Path) -> None:
    starts = CrashLoop(RunDir(tmp_path), lambda: False)
    starts.begin(3, lambda: False)
    starts.end(200, "", generations=1)
    assert not (tmp_path / STARTS).exists()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"starts": "x"}', "null", '{"starts": 3}'])
def test_what_is_no_record_counts_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / STARTS).write_text(content)
    begin(tmp_path)._timer.cancel()
    assert counted(tmp_path).starts == 1


def test_a_volume_that_fails_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    begin(tmp_path / "file")._timer.cancel()
    assert "cannot record this start" in caplog.text
