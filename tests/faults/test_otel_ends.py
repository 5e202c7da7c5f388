"""The last step of a run reaches the collector, however it ends, also if the sending process is killed."""

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from otel_runs import Sent, only, words_of
from small_runs import Runs, rank_processes

from patience import patient

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]
AT_ONCE = 4


class Ending:
    """A run that is about to end, in its own directory."""

    def __init__(self, sent: Sent, run: str, chance: random.Random) -> None:
        self.sent = sent
        self.run = run
        self.chance = chance
        self.launch: Any = None

    def start(self, steps: int, *flags: object) -> None:
        self.launch = self.sent.start("--nproc", 1, "--steps", steps, *flags, run=self.run)
        self.sent.runs.until(lambda: self.sent.last_step(self.run) >= 5, "step 5")
        self.sender = self.sent.wait_for_sender(run=self.run)
        time.sleep(self.chance.uniform(0.0, 1.0))

    def wait_for_sender(self) -> None:
        self.sent.runs.until(lambda: not self.sent.sender(self.run), "end of the sending process")

    def kill_sender(self) -> None:
        os.kill(self.sender, signal.SIGKILL)

    def kill_rank(self) -> None:
        os.kill(rank_processes(self.launch.pid)["tandem-rank-0"], signal.SIGKILL)

    def stop(self) -> None:
        self.launch.send_signal(signal.SIGTERM)


def finishes(ending: Ending) -> str:
    ending.start(ending.chance.randrange(60, 120))
    return "finished"


def finishes_and_loses_its_sender(ending: Ending) -> str:
    ending.start(ending.chance.randrange(60, 120))
    ending.kill_sender()
    return "finished"


def is_stopped(ending: Ending) -> str:
    ending.start(100_000)
    ending.stop()
    return "stop"


def is_stopped_when_its_sender_is_killed(ending: Ending) -> str:
    ending.start(100_000)
    ending.kill_sender()
    ending.stop()
    return "stop"


def is_stopped_in_a_pause_of_its_sender(ending: Ending) -> str:
    """The second pause before a restart is longer, and the third one again."""
    ending.start(100_000)
    for _ in range(2):
        ending.kill_sender()
        ending.sender = ending.sent.wait_for_sender(ending.sender, ending.run)
    ending.kill_sender()
    ending.stop()
    return "stop"


def loses_its_sender_while_it_ends(ending: Ending) -> str:
    ending.start(100_000)
    ending.stop()
    time.sleep(ending.chance.uniform(0.0, 0.5))
    if words_of(ending.sender):
        ending.kill_sender()
    return "stop"


def loses_its_rank(ending: Ending) -> str:
    ending.start(100_000, "--max-restarts", 0)
    ending.kill_rank()
    return "failure"  # of the restart budget


def loses_its_agent(ending: Ending) -> str:
    ending.start(100_000)
    os.kill(ending.launch.pid, signal.SIGKILL)
    return "launch killed"


KINDS: list[Callable[[Ending], str]] = [
    finishes, finishes_and_loses_its_sender, is_stopped, is_stopped_when_its_sender_is_killed,
    is_stopped_in_a_pause_of_its_sender, loses_its_sender_while_it_ends, loses_its_rank, loses_its_agent,
]  # fmt: skip


@pytest.mark.parametrize(
    "ends", [pytest.param(2 * len(KINDS), marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.soak)]
)
def test_the_last_step_arrives(runs: Runs, sent: Sent, ends: int) -> None:
    runs.environment["OTEL_METRIC_EXPORT_INTERVAL"] = "3600000"  # only the end sends metrics again
    with ThreadPoolExecutor(AT_ONCE) as pool:
        missing = list(filter(None, pool.map(lambda number: missing_after(sent, number), range(ends))))
    assert not missing, f"{len(missing)} of {ends}: " + "\n".join(missing)


def missing_after(sent: Sent, number: int) -> str:
    """End a run in one of the ways; what the collector then lacks, or ""."""
    kind = KINDS[number % len(KINDS)]
    ending = Ending(sent, f"run-{number}", random.Random(number))
    cause = kind(ending)
    output, _ = ending.launch.communicate(timeout=patient(100))
    ending.wait_for_sender()
    last = sent.last_step(ending.run)
    arrived = sent.collector.last_of_run("tandem_global_step", ending.run)
    spans = sent.collector.spans("run")
    span = only([each for each in spans if each.resource["tandem.run"] == ending.run])
    found = f"{ending.run} {kind.__name__}: step {arrived} of {last}, {span.cause}"
    print(found, flush=True)
    # A rank reports a finished step before it writes its line, and the kill may come between the two.
    steps = (last, last + 1) if kind in (loses_its_rank, loses_its_agent) else (last,)
    return "" if arrived in steps and span.cause == cause else f"{found}\n{output}"
