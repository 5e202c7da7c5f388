"""Files that grow with a run stay bounded, and nobody who writes or reads them notices."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import patient
from tandem import rotation
from tandem.launch.kill import processes_of
from tandem.log import setup
from tandem.report.about import About
from tandem.report.history import History
from tandem.rotation import older
from tandem.run.directory import RunDir
from tandem.telemetry import journal as journal_module
from tandem.telemetry.journal import Journal, Restarts, read_events
from tandem.work.base import last_words

SMALL = 2000


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rotation, "LOG_BYTES", SMALL)
    monkeypatch.setattr(journal_module, "EVENTS_BYTES", SMALL)
    yield
    setup(None, None, 0, to_terminal=False, json_lines=False)


def both(path: Path) -> str:
    """All that is left of what was written to `path`."""
    return (older(path).read_text() if older(path).exists() else "") + path.read_text()


def end_to_end(path: Path) -> list[int]:
    """The numbers of the lines, each of which has to be whole."""
    return [int(line.rpartition(" ")[2]) for line in both(path).splitlines()]


WRITER = """
import os, pathlib, subprocess, sys, threading
from tandem import log, rotation

rotation.LOG_BYTES = 2000
path = pathlib.Path(sys.argv[1])
log.redirect_output(path)

def write():  # as native code does: it knows nothing of sys.stdout
    for number in range(20_000):
        os.write(1 + number % 2, b"line %d\\n" % number)

thread = threading.Thread(target=write)
thread.start()
while thread.is_alive():
    log.renew_outputs()
log.renew_outputs()
subprocess.run(["echo", "line 20000"])
"""


def test_what_native_code_writes_during_a_rename_is_lost_in_no_byte(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.log"
    path.write_text("line -1\n" * 1000)  # full already: as a restart finds it
    subprocess.run([sys.executable, "-c", WRITER, str(path)], check=True, timeout=patient(60))
    numbers = end_to_end(path)
    assert numbers == list(range(numbers[0], 20_001)) and numbers[0] > 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["rank-1.log", "rank-1.log.1"]


def test_a_restart_puts_a_full_log_aside_and_cuts_none(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.log"
    for before in ("a line\n" * 10, "a line\n" * 1000):
        path.write_text(before)
        code = "import pathlib, sys; from tandem import log, rotation; rotation.LOG_BYTES = 2000; "
        code += "log.redirect_output(pathlib.Path(sys.argv[1])); print('after')"
        subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=patient(60))
        assert both(path) == before + "after\n"
    assert older(path).exists() and path.read_text() == "after\n"


def test_a_program_that_sends_its_output_elsewhere_is_left_alone(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "rank-1.log", tmp_path / "own.log"
    code = WRITER.replace("thread.start()", "os.dup2(os.open(sys.argv[2], 65), 1); thread.start()")
    subprocess.run([sys.executable, "-c", code, str(path), str(elsewhere)], check=True, timeout=patient(60))
    assert len(elsewhere.read_text().splitlines()) == 10_001
    assert end_to_end(path)[-1] == 19_999


def test_two_loggers_of_one_file_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "log" / "node-0.log"
    setup(path, None, 0, to_terminal=False, json_lines=False)
    ours = logging.getLogger("tandem")
    (theirs,) = ours.handlers
    ours.removeHandler(theirs)  # as that of the tracker's process
    setup(path, None, 0, to_terminal=False, json_lines=False)
    for number in range(1000):
        record = logging.makeLogRecord({"msg": f"line {number}"})
        (theirs if number % 3 else ours.handlers[0]).handle(record)
    theirs.close()
    numbers = end_to_end(path)
    assert numbers == list(range(numbers[0], 1000)) and numbers[0] > 0
    assert max(each.stat().st_size for each in path.parent.iterdir()) < SMALL + 100


def append_starts(folder: Path, count: int) -> None:
    journal_module.EVENTS_BYTES = SMALL
    journal = Journal(folder)
    for number in range(count):
        journal.event("world", number=number, nodes=1)


def test_restarts_count_on_when_two_processes_write_events_of_many_files(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append_starts, args=(tmp_path, 300)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert Restarts(read_events(tmp_path)).by_reason == {"crash": 599}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["events.jsonl", "events.jsonl.1"]
    assert max(each.stat().st_size for each in tmp_path.iterdir()) < SMALL + 300


def test_restarts_are_counted_beyond_what_is_read_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an events.jsonl of more than 4 MiB the last ones alone were counted."""
    monkeypatch.setattr(journal_module, "EVENTS_BYTES", rotation.EVENTS_BYTES)
    journal = Journal(tmp_path)
    for _ in range(60):
        journal.event("world", nodes=1, told="x" * 100_000)
    assert Restarts(read_events(tmp_path)).total == 59


def test_a_kill_between_the_renames_loses_no_count(tmp_path: Path) -> None:
    append_starts(tmp_path, 20)
    total = Restarts(read_events(tmp_path)).total
    (tmp_path / "events.jsonl").replace(tmp_path / "events.jsonl.1")  # on a volume without hard links
    assert Restarts(read_events(tmp_path)).total == total
    append_starts(tmp_path, 1)
    assert Restarts(read_events(tmp_path)).total == total + 1


@pytest.mark.parametrize("starts", [20, 60])
def test_a_kill_where_both_names_are_one_file_counts_nothing_twice(tmp_path: Path, starts: int) -> None:
    append_starts(tmp_path, starts)
    total, path = Restarts(read_events(tmp_path)).total, tmp_path / "events.jsonl"
    older(path).unlink(missing_ok=True)
    os.link(path, older(path))
    assert Restarts(read_events(tmp_path)).total == total
    append_starts(tmp_path, 60)
    assert Restarts(read_events(tmp_path)).total == total + 60
    assert sorted(each.name for each in tmp_path.iterdir()) == ["events.jsonl", "events.jsonl.1"]


@pytest.mark.parametrize("junk", [{"restarts": [1]}, {"restarts": {"crash": "x"}, "next": 7}, {}])
def test_a_count_that_is_none_counts_nothing(junk: dict[str, object]) -> None:
    assert Restarts([{"kind": "counted", **junk}, {"kind": "world"}]).total == 0


def test_whoever_is_frozen_at_the_rename_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "TRIES", 5)
    append_starts(tmp_path, 20)
    path = tmp_path / "events.jsonl"
    code = "import fcntl, sys, time; file = open(sys.argv[1], 'r+b'); fcntl.flock(file, fcntl.LOCK_EX); "
    code += "print('held', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as frozen:
        try:
            assert frozen.stdout is not None and frozen.stdout.readline() == b"held\n"
            frozen.send_signal(signal.SIGSTOP)
            append_starts(tmp_path, 20)
        finally:
            frozen.kill()
    assert Restarts(read_events(tmp_path)).total == 39
    append_starts(tmp_path, 1)
    assert path.stat().st_size < SMALL, "it is put aside as soon as it can be"


def test_readers_find_events_of_both_files(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in range(40):
        journal.event("checkpoint", step=step)
    shown = History(RunDir(tmp_path)).now()["events"]
    assert isinstance(shown, list)
    steps = [event["step"] for event in reversed(shown)]
    assert steps == list(range(steps[0], 40)) and "counted" in (tmp_path / "events.jsonl").read_text()
    assert len(steps) > len((tmp_path / "events.jsonl").read_text().splitlines())


def test_the_end_of_a_log_is_that_of_both_files(tmp_path: Path) -> None:
    log = tmp_path / "log" / "rank-1.log"
    log.parent.mkdir()
    older(log).write_text("first\n" * 100_000 + "Traceback\n  in step 7\n")
    log.write_text("KeyError: 4\n")
    lines = About(tmp_path).log("rank 1 on node 0: KeyError: 4")["lines"]
    assert isinstance(lines, list)
    assert lines[-4:] == ["first", "Traceback", "  in step 7", "KeyError: 4"] and set(lines[:-3]) == {"first"}
    assert last_words(tmp_path / "none", log)[-2:] == ("  in step 7", "KeyError: 4")
    log.unlink()  # it has been renamed, and the new one is not there yet
    assert About(tmp_path).log("rank 1")["file"] == "log/rank-1.log"


def test_a_signal_finds_the_rank_whose_log_was_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "log" / "rank-1.log"
    path.parent.mkdir()
    path.write_text("full\n" * 1000)
    code = "import pathlib, sys, subprocess; from tandem import log, rotation; rotation.LOG_BYTES = 2000; "
    code += "log.redirect_output(pathlib.Path(sys.argv[1])); child = subprocess.Popen(['sleep', '600']); "
    code += "print('x' * 3000, flush=True); log.renew_outputs(); "
    code += "sys.stdin.readline(); child.kill()"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE) as rank:
        try:
            for _ in range(1200):
                if older(path).exists() and "xxx" in older(path).read_text():
                    break
                time.sleep(0.05)
            assert processes_of(RunDir(tmp_path)) == {("rank", 1): rank.pid}
        finally:
            rank.communicate(b"\n", timeout=patient(60))


def test_a_folder_without_locks_keeps_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(rotation.fcntl, "flock", none)
    append_starts(tmp_path, 40)
    assert [event["number"] for event in read_events(tmp_path)] == [*range(40)]
    assert [each.name for each in tmp_path.iterdir()] == ["events.jsonl"]
