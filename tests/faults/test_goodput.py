"""The time ledger of a run with several launches: what was planted is what it says."""

import os
import signal
import time
from pathlib import Path

import pytest
from small_runs import Runs, rank_processes

from patience import patient
from tandem.bounded_reader import RunFiles
from tandem.report.goodput import ledger_of
from tandem.telemetry.ledger import Cost

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

HANG_SECONDS = 4
FLAGS = ("--nproc", 2, "--steps", 100_000, "--checkpoint-every", "1s", "--log-every", 5)
FLAGS = (*FLAGS, "--hang-timeout", HANG_SECONDS, "--max-restarts", 100)


def lines(folder: Path) -> int:
    journal = folder / "metrics.jsonl"
    return len(journal.read_text().splitlines()) if journal.exists() else 0


def more(runs: Runs) -> None:
    before = lines(runs.folder / "run")
    runs.until(lambda: lines(runs.folder / "run") > before + 3, "steps")


def worlds(runs: Runs) -> int:
    return (runs.folder / "run" / "events.jsonl").read_text().count('"world"')


def hit(runs: Runs, pid: int, number: signal.Signals) -> None:
    """Send a signal to rank 1, and wait until the next generation trains."""
    before = worlds(runs)
    os.kill(rank_processes(pid)["tandem-rank-1"], number)
    runs.until(lambda: worlds(runs) > before, "a restart")
    more(runs)


@pytest.mark.parametrize("rounds", [2, pytest.param(5, marks=pytest.mark.soak)])
def test_each_planted_cause_has_its_cost_and_the_parts_add_up(runs: Runs, rounds: int) -> None:
    began = time.time()
    away = 0.0
    ended = began
    for number in range(2 * rounds):
        away += time.time() - ended
        process = runs.start("launch", "run", *FLAGS, delay=0.02)
        more(runs)
        if number % 2 == 0:
            hit(runs, process.pid, signal.SIGKILL)
            hit(runs, process.pid, signal.SIGSTOP)
            process.send_signal(signal.SIGTERM)
        else:
            process.send_signal(signal.SIGKILL)  # the agent
        code, output = runs.processes.wait(process)
        assert code in (143, -signal.SIGKILL, 137), output
        ended = time.time()
        time.sleep(3)
    ledger = ledger_of(RunFiles(runs.folder / "run"))
    whole = ended - began
    # What an agent charges is within the life of its process; the last one was killed between two writes.
    assert whole - patient(20) < ledger.wall < whole + 1, (ledger, whole)
    assert ledger.parts["away"] > away
    assert ledger.parts["steps"] > 0 and ledger.parts["redone"] > HANG_SECONDS * rounds
    causes = ledger.causes
    assert [causes[each].times for each in ("rank killed", "hang", "stop")] == [rounds] * 3, causes
    assert causes["hang"].seconds > HANG_SECONDS * rounds
    assert causes["stop"].seconds > 3 * rounds
    assert causes.get("launch killed", Cost(0, 0)).times == rounds - 1  # nothing follows the last one


def test_metrics_have_the_time_of_the_launches_before(runs: Runs) -> None:
    for steps in (20, 40):
        runs.finish("launch", "run", "--nproc", 1, "--steps", steps)
    page = (runs.folder / "run" / "metrics.prom").read_text().splitlines()
    told = dict(line.rsplit(" ", 1) for line in page if line.startswith("tandem_run_seconds"))
    seconds = {part: float(value) for part, value in told.items()}
    assert seconds['tandem_run_seconds{part="away"}'] > 0 and seconds['tandem_run_seconds{part="steps"}'] > 0
    assert sum(seconds.values()) <= ledger_of(RunFiles(runs.folder / "run")).wall + 0.01
