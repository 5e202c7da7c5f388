"""Ranks without an agent say what a stop does, and a second Ctrl-C ends them, whatever they are at."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from small_runs import Runs

from program_files import program_text
from tandem.checkpoint.listing import list_checkpoints, newest_step
from tandem.run.directory import RunDir
from tandem.timeouts import REPEAT_WINDOW_SECONDS
from tree import of_launch

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

SAVES = ("--checkpoint-every", "20", "--steps", "100000")
AGAIN = "press Ctrl-C again"

STAND = program_text("lone_stops_stand")

STUCK = program_text("lone_stops_stuck")

LOOP = program_text("lone_stops_loop")

SLOW_START = program_text("lone_stops_slow_start")


def write(runs: Runs, **modules: str) -> None:
    for name, text in {"stand": STAND, **modules}.items():
        (runs.folder / f"{name}.py").write_text(text)


def stands(runs: Runs) -> None:
    runs.until((runs.folder / "stands").exists, "rank that stands")
    (checkpoints,) = runs.folder.glob("*/checkpoints")
    runs.until(lambda: newest_step(RunDir(checkpoints.parent).checkpoints) == 20, "save")


def interrupt_twice(process: Any) -> None:
    process.send_signal(signal.SIGINT)
    time.sleep(REPEAT_WINDOW_SECONDS + 0.5)
    process.send_signal(signal.SIGINT)


def nothing_is_left(runs: Runs, process: Any, run: str, temporary: Path) -> None:
    runs.until(lambda: not of_launch(process.pid), "end of all processes", limit=20)
    assert not list(temporary.glob("tandem-*"))
    assert runs.summary(run)["exit_code"] == 130
    (row,) = list_checkpoints(RunDir(runs.folder / run).checkpoints, verify=True)
    assert row.step == 20 and row.verified
    assert not list((runs.folder / run / "owner").glob("*"))


def test_the_first_signal_of_a_lone_process_is_answered_with_a_line(runs: Runs) -> None:
    process = runs.start("train", "alone", *SAVES, delay=0.01)
    runs.wait_for_step("alone", 20)
    process.terminate()
    code, output = runs.processes.wait(process)
    assert code == 143, output
    (line,) = [line for line in output.splitlines() if AGAIN in line]
    assert "SIGTERM: " in line and "alone/checkpoints" in line
    assert "the last save took" in line
    summary = runs.summary("alone")
    assert summary["last_checkpoint_step"] == summary["global_step"]


def test_a_second_interrupt_ends_a_lone_process_that_waits_in_c(runs: Runs, tmp_path: Path) -> None:
    write(runs, stuck=STUCK)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    runs.environment["TMPDIR"] = str(temporary)
    process = runs.start("train", "stuck", *SAVES, "--task", "stuck.py:Stuck", "--workers", 2)
    stands(runs)
    interrupt_twice(process)
    code, output = runs.processes.wait(process, 30)
    assert code == 130, output
    assert output.count(AGAIN) == 1 and "second Ctrl-C" in output, output
    assert "newest checkpoint is step 20" in output and "Traceback" not in output, output
    nothing_is_left(runs, process, "stuck", temporary)


@pytest.mark.soak
def test_a_second_interrupt_ends_a_loop_of_ones_own(runs: Runs, tmp_path: Path) -> None:
    write(runs, loop=LOOP)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    settings = {"RUN_DIR": "loop", "CHECKPOINT_EVERY": "20", "METRICS": "0", "METRICS_LINGER": "0"}
    runs.environment |= {"TMPDIR": str(temporary), **{f"TANDEM_{n}": v for n, v in settings.items()}}
    python = runs.command("train", "loop")[0]
    process = runs.processes.start([python, "loop.py"], cwd=runs.folder, env=runs.environment)
    stands(runs)
    interrupt_twice(process)
    code, output = runs.processes.wait(process, 30)
    assert code == 130, output
    assert output.count(AGAIN) == 1 and "Traceback" not in output, output
    nothing_is_left(runs, process, "loop", temporary)


def test_a_stop_of_a_lone_process_before_its_first_step_ends_it(runs: Runs) -> None:
    (runs.folder / "log.py").write_text(SLOW_START)
    process = runs.start("train", "early", "--task", "log.py:SlowStart")
    while "making data" not in (line := process.stdout.readline()):
        assert line, "it has ended"
    process.terminate()
    code, output = runs.processes.wait(process, 30)
    assert code == 137, output
    assert output.count("SIGTERM came before the first step; nothing to save") == 1, output
    assert "Traceback" not in output


def test_ranks_under_torchrun_say_it_once_and_end_at_a_second_interrupt(runs: Runs) -> None:
    """torchrun hands on the first Ctrl-C, and SIGTERM at the second: its ranks have sessions of their own."""
    write(runs, stuck=STUCK)
    process = runs.start("torchrun", "two", *SAVES, "--task", "stuck.py:Stuck", "--threads", 1)
    stands(runs)
    ranks = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/stat")
        if (words := path.read_text().rpartition(")")[2].split())[1] == str(process.pid) and words[0] != "Z"
    ]
    assert len(ranks) == 2
    interrupt_twice(process)
    code, output = runs.processes.wait(process, 60)
    assert code != 0 and output.count(AGAIN) == 1, output
    runs.until(
        lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), "end of the ranks", limit=20
    )
