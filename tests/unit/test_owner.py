"""Who a run directory belongs to: one launch at a time, and an owner that comes back publishes nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from patience import patient
from program_files import program_text
from tandem.checkpoint.retention import Retention
from tandem.checkpoint.storage.lease_records import FolderLeaseRecords, LeaseRecords, lease_records_at
from tandem.checkpoint.store import CheckpointStore
from tandem.checkpoint.writer import CheckpointWriter
from tandem.errors import CheckpointError, ConfigError, RunTakenError, StoppedError
from tandem.platforms.detection import Placement
from tandem.run.lease import LeaseRecord, Token, acquire, fence, owner_here, refuse_if_owned, restarted_as

HOLD = program_text("owner_hold")

Hold = Callable[[Path], "subprocess.Popen[str]"]


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Starts a process that owns a run until it is sent a line."""
    started = []

    def start(run: Path) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline().strip().isdigit()
        return process

    yield start
    for process in started:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate(timeout=patient(20))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def the_note(run: Path) -> LeaseRecord:
    notes = lease_records_at(run / "owner")
    note = LeaseRecord.parse(notes.read(max(notes.numbers())))
    assert note is not None
    return note


def change(run: Path, **fields: Any) -> None:
    notes = lease_records_at(run / "owner")
    number = max(notes.numbers())
    notes.rewrite(number, replace(the_note(run), **fields).render())


def elsewhere(run: Path, **more: Any) -> None:
    """Make the newest note one of another machine."""
    change(run, host="far", machine="", boot="another", space=1, **more)


def test_a_second_launch_is_refused_in_one_line_until_the_first_has_ended(run: Path, hold: Hold) -> None:
    first = hold(run)
    with pytest.raises(ConfigError) as refused:
        acquire(run)
    line = str(refused.value)
    assert f"process {first.pid} on {os.uname().nodename}, started 20" in line and f"kill {first.pid}" in line
    assert "another --run-dir" in line and "\n" not in line
    with pytest.raises(ConfigError, match="in use by another launch"):
        refuse_if_owned(run)
    assert first.communicate("\n", timeout=patient(20)) and first.returncode == 0
    refuse_if_owned(run)
    assert not run.exists(), "a launch that has written nothing leaves nothing"
    acquire(run).close()


def test_a_killed_owner_is_taken_over_with_a_line(
    run: Path, hold: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    first = hold(run)
    first.kill()
    first.wait(20)
    with caplog.at_level("INFO"):
        mine = acquire(run)
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"taking {run} over from process {first.pid}" in line and "which has exited" in line
    assert mine.token is not None and mine.token.number == 2
    mine.close()
    again = acquire(run)
    assert again.token is not None and again.token.number == 3, "a number is never given twice"
    again.close()
    assert len(caplog.records) == 1, "one that has ended as it should needs no line"


def test_a_frozen_owner_loses_the_run_and_publishes_nothing_when_it_comes_back(run: Path, hold: Hold) -> None:
    first = hold(run)
    token = Token(1, the_note(run).word)
    first.send_signal(signal.SIGSTOP)
    with pytest.raises(ConfigError):
        acquire(run)
    mine = acquire(run, expiry=0.0)
    store = CheckpointStore(run / "checkpoints", fence(run, mine.token))
    store.save(1, b"mine", {})
    late = CheckpointStore(run / "checkpoints", fence(run, token))
    for attempt in (
        lambda: late.save(2, b"late", {}),
        lambda: late.save(1, b"late", {}),
        lambda: late.quarantine(1),
    ):
        with pytest.raises(RunTakenError, match=f"taken over by process {os.getpid()} .*--run-dir"):
            attempt()
    assert store.steps() == [1] and store.read(1)[0] == b"mine"
    first.send_signal(signal.SIGCONT)
    first.communicate("\n", timeout=patient(20))
    assert first.returncode == 0 and the_note(run).process == os.getpid(), "the late one ends no claim"
    mine.close()


def test_a_step_published_between_two_looks_is_withdrawn(run: Path) -> None:
    looks = iter([None, RunTakenError("taken")])

    def taken_meanwhile() -> None:
        if (error := next(looks)) is not None:
            raise error

    store = CheckpointStore(run / "checkpoints", taken_meanwhile)
    with pytest.raises(RunTakenError):
        store.save(7, b"late", {})
    assert store.steps() == []


def test_the_writer_ends_the_run_and_prunes_nothing(run: Path) -> None:
    mine = acquire(run)
    store = CheckpointStore(run / "checkpoints", fence(run, mine.token))
    for step in range(1, 4):
        store.save(step, b"x", {})
    lease_records_at(run / "owner").create(2, replace(the_note(run), word="other").render())
    writer = CheckpointWriter(store, Retention(newest=1), failures_allowed=3)
    writer.save(4, {}, {})
    with pytest.raises(RunTakenError):
        writer.wait()
    with pytest.raises(RunTakenError):
        store.prune(Retention(newest=1))
    assert store.steps() == [3, 2, 1]
    mine.close()


def test_the_owner_hears_that_it_was_taken_over(run: Path) -> None:
    mine = acquire(run, renew_seconds=0.02)
    until(lambda: the_note(run).renewals > 2)
    mine.check()
    lease_records_at(run / "owner").create(2, replace(the_note(run), word="other", host="far").render())
    until(lambda: bool(mine.lost))
    with pytest.raises(RunTakenError, match="on far"):
        mine.check()
    assert not mine.confirm_ownership()
    mine.close()
    assert the_note(run).word == "other" and not the_note(run).is_over


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_elsewhere_an_owner_lives_while_it_renews_its_note(run: Path, hold: Hold) -> None:
    hold(run).kill()
    elsewhere(run)
    begun = threading.Event()

    def renew() -> None:
        begun.wait(30)
        change(run, renewals=1)

    thread = threading.Thread(target=renew)
    thread.start()
    with pytest.raises(ConfigError, match="process .* on far"):
        acquire(run, should_stop=lambda: bool(begun.set()))
    thread.join()
    with pytest.raises(StoppedError):
        acquire(run, should_stop=lambda: True)
    mine = acquire(run, expiry=0.5)
    assert mine.token is not None and mine.token.number == 2
    mine.close()


def test_one_that_says_that_it_is_over_is_not_waited_for(run: Path, hold: Hold) -> None:
    hold(run).kill()
    elsewhere(run)
    mine = acquire(run, should_stop=lambda: change(run, is_over=True) is not None)
    assert mine.token is not None
    mine.close()


def test_the_same_job_started_again_elsewhere_does_not_wait(run: Path, hold: Hold) -> None:
    hold(run).kill()
    elsewhere(run)
    mine = acquire(run, "a job", should_stop=lambda: pytest.fail("it waits"))
    assert mine.token is not None
    mine.close()


def test_a_copy_of_a_running_run_is_not_the_run(run: Path, hold: Hold, tmp_path: Path) -> None:
    hold(run)
    shutil.copytree(run, copy := tmp_path / "copy")
    assert owner_here(run) is not None and owner_here(copy) is None
    mine = acquire(copy, "a job", expiry=1.0)
    assert mine.token is not None and mine.token.number == 2
    with pytest.raises(ConfigError, match="in use by another launch"):
        acquire(run)
    mine.close()


def test_a_run_under_another_name_has_its_owner(run: Path, hold: Hold, tmp_path: Path) -> None:
    hold(run)
    (link := tmp_path / "link").symlink_to(run)
    with pytest.raises(ConfigError, match="in use by another launch"):
        refuse_if_owned(link)
    change(run, place="as under a second mount of the volume")
    with pytest.raises(ConfigError, match="in use by another launch"):  # the owner renews its lease
        acquire(run, "a job", expiry=patient(60))


def test_a_machine_that_was_started_again_has_no_owners_of_before(run: Path, hold: Hold) -> None:
    hold(run).kill()
    change(run, boot="earlier", machine="m")
    here = replace(LeaseRecord.for_this_process(""), machine="m")
    assert the_note(run).is_seen_from(here) and the_note(run).is_gone(here)
    assert not the_note(run).is_seen_from(replace(here, host="another of that image"))


def test_a_job_is_the_same_where_its_platform_starts_it_once() -> None:
    pods = Placement("kubeflow-v1", 3, 0, None, "digits-master-0", 23456)
    assert restarted_as(pods) == "kubeflow-v1 digits-master-0:23456"
    assert restarted_as(replace(pods, master_host="localhost")).split(":")[0].endswith(os.uname().nodename)
    assert restarted_as(replace(pods, platform="by-hand")) == ""
    assert restarted_as(replace(pods, platform="slurm", job="slurm-7.0")) == "slurm-7.0"


def test_a_process_of_the_owners_own_writes_on_its_behalf(run: Path) -> None:
    mine = acquire(run)
    code = "import sys; from pathlib import Path; from tandem.run.lease import acquire\n"
    code += "lent = acquire(Path(sys.argv[1])); print(lent.token.number); lent.close()"
    result = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True)
    assert result.stdout.strip() == "1", result.stderr
    assert mine.confirm_ownership() and not the_note(run).is_over
    mine.close()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"[" * 5000, b'{"word": 1}', b"\xff" * 100, "wrong kinds"],
    ids=range(8),
)
def test_what_is_no_note_is_watched_and_then_replaced(run: Path, content: bytes | str) -> None:
    if isinstance(content, str):
        content = json.dumps({**asdict(LeaseRecord.for_this_process("")), "renewed": "soon"}).encode()
    (run / "owner").mkdir(parents=True)
    (run / "owner" / "000000003").write_bytes(content)
    mine = acquire(run, expiry=0.1)
    assert mine.token is not None and mine.token.number == 4
    mine.close()


def test_a_note_that_somebody_removes_is_written_anew_with_a_warning(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = acquire(run)
    fence(run, mine.token)()
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    (run / "owner" / "000000001").unlink()
    (run / "owner").rmdir()
    fence(run, mine.token)()
    fence(run, mine.token)()
    assert mine.token is not None and the_note(run).word == mine.token.word
    (warned,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert str(run) in warned and "\n" not in warned
    mine.close()


def test_of_many_at_once_one_gets_it(run: Path) -> None:
    together, got, refused = threading.Barrier(8), list[str](), list[str]()

    def one() -> None:
        together.wait()
        notes = FolderLeaseRecords(run / "owner")
        note = LeaseRecord.for_this_process("")
        (got if notes.create(1, note.render()) else refused).append(note.word)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1 and len(refused) == 7
    assert [the_note(run).word] == got
    assert sorted(os.listdir(run / "owner")) == ["000000001"]


def test_without_hard_links_a_note_is_made_all_the_same(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    notes: LeaseRecords = FolderLeaseRecords(run / "owner")
    assert notes.create(1, b"a" * 10) and not notes.create(1, b"b" * 10)
    assert notes.read(1) == b"a" * 10


def test_a_volume_that_cannot_be_written_to_is_a_matter_of_who_has_to(run: Path, tmp_path: Path) -> None:
    tmp_path.joinpath("file").write_text("")
    mine = acquire(tmp_path / "file" / "run")
    assert mine.token is None and mine.problem is not None and mine.confirm_ownership()
    fence(run, mine.token)()
    mine.close()


def test_a_volume_that_fails_for_a_moment_is_a_failed_save(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = acquire(run)
    store = CheckpointStore(run / "checkpoints", fence(run, mine.token))

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(FolderLeaseRecords, "read", fail)
        with pytest.raises(CheckpointError, match="Input/output error"):
            store.save(1, b"x", {})
        assert mine.confirm_ownership(), "nobody knows better"
    assert store.steps() == []
    store.save(1, b"x", {})
    mine.close()
