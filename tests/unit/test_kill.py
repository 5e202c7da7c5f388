"""`tandem kill`: exactly the rank of exactly this run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from patience import patient
from program_files import program_text
from tandem.cli import run
from tandem.errors import ConfigError
from tandem.launch.kill import processes_of
from tandem.log import redirect_output, setup
from tandem.process import below, living
from tandem.run.directory import RunDir

WRITER = program_text("kill_writer")
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """A process that has a file open, with a child that has it, too."""
    started: list[subprocess.Popen[str]] = []

    def begin(path: Path, mode: str = "a", of_child: Path | None = None) -> subprocess.Popen[str]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), mode, *([str(of_child)] if of_child else [])],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None and int(process.stdout.readline()) == process.pid
        return process

    yield begin
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait(timeout=patient(10))
        assert process.stdout is not None
        process.stdout.close()


def test_one_rank_of_one_run_is_killed(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, others = tmp_path / "mine", tmp_path / "others"
    wanted = start(mine / "log" / "rank-1.log")
    reader = start(mine / "log" / "rank-1.log", "r")
    spared = [reader, start(mine / "log" / "rank-10.log"), start(others / "log" / "rank-1.log")]
    assert processes_of(RunDir(mine)) == {("rank", 1): wanted.pid, ("rank", 10): spared[1].pid}
    assert run("kill", [str(mine), "--rank", "1"], {}) == 0
    assert wanted.wait(timeout=patient(30)) == -signal.SIGKILL
    assert capsys.readouterr().out == f"rank 1 of {mine} (process {wanted.pid}): SIGKILL\n"
    assert all(process.poll() is None for process in spared)


def test_a_node_is_stopped_with_its_ranks_and_goes_on(start: Start, tmp_path: Path) -> None:
    agent = start(tmp_path / "log" / "node-0.log", of_child=tmp_path / "log" / "rank-0.log")
    (rank,) = below(agent.pid)
    for name, state in (("STOP", "T"), ("CONT", "S")):
        run("kill", [str(tmp_path), "--node", "0", "--signal", name], {})
        deadline = time.monotonic() + 30
        while (now := [living()[pid].state for pid in (agent.pid, rank.pid)]) != [state] * 2:
            assert time.monotonic() < deadline, now
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{run}", "--rank", "3"], "has no rank 3 on this machine; ranks running here: 1"),
        (["{run}", "--node", "0"], "has no node 0 on this machine; nodes running here: none"),
        (["{run}"], "give either --rank N or --node N"),
        (["{run}", "--rank", "1", "--node", "1"], "give either --rank N or --node N"),
        (["{run}/log", "--rank", "1"], "is not a run"),
        (["{run}/early", "--rank", "1"], "early has not started"),
        (["{run}", "--rank", "1", "--signal", "SEGV"], "invalid choice: 'SEGV'"),
    ],
)
def test_what_cannot_be_is_one_line(start: Start, tmp_path: Path, words: list[str], said: str) -> None:
    start(tmp_path / "log" / "rank-1.log")
    (tmp_path / "early" / "owner").mkdir(parents=True)
    with pytest.raises(ConfigError, match=said):
        run("kill", [word.format(run=tmp_path) for word in words], {})


def test_no_link_leads_to_the_processes_of_another_run(start: Start, tmp_path: Path) -> None:
    """Neither a linked folder, nor a linked log, nor another run's log that is a link to this one's."""
    theirs = start(tmp_path / "theirs" / "log" / "rank-1.log")
    for name in ("folder", "file", "mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "folder" / "log").symlink_to(tmp_path / "theirs" / "log")
    (tmp_path / "file" / "log").mkdir()
    (tmp_path / "file" / "log" / "rank-1.log").symlink_to(tmp_path / "theirs" / "log" / "rank-1.log")
    for name, said in (("folder", "is a link"), ("file", "has no rank 1")):
        with pytest.raises(ConfigError, match=said):
            run("kill", [str(tmp_path / name), "--rank", "1"], {})
    assert theirs.poll() is None


def test_a_rank_whose_agent_is_of_another_run_is_not_this_run_s(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "mine" / "log" / "rank-1.log"
    log.parent.mkdir(parents=True)
    log.touch()
    agent = start(tmp_path / "theirs" / "log" / "node-0.log", "a", log)
    assert processes_of(RunDir(tmp_path / "mine")) == {} and processes_of(RunDir(tmp_path / "theirs")) == {
        ("node", 0): agent.pid
    }


def test_our_process_is_meant_where_a_person_s_writes_to_the_log_too(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "log" / "rank-1.log"
    log.parent.mkdir()
    tee = subprocess.Popen(["tee", "-a", str(log)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        rank = start(log)
        assert processes_of(RunDir(tmp_path)) == {("rank", 1): rank.pid}
    finally:
        tee.communicate()


def test_logs_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "theirs.log").touch()
    (tmp_path / "rank-0.log").symlink_to(tmp_path / "theirs.log")
    with pytest.raises(ConfigError, match=r"rank-0\.log"):
        setup(tmp_path / "rank-0.log", 0, 0, False, False)
    with pytest.raises(OSError):
        redirect_output(tmp_path / "rank-0.log")
    assert (tmp_path / "theirs.log").read_bytes() == b""
