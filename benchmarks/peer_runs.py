"""Run a contender of peers.py: start it, watch the records of its ranks, kill one, and judge the result.

Each trial is a separate launch. When all ranks have finished a step, it trains for SETTLED_SECONDS more, so
that a contender can prepare for a restart. Then its memory is measured, and a random rank is killed (SIGKILL)
at a random step of the next SPREAD_STEPS. The trial ends when all ranks are BEYOND_STEPS further than before.
"""

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from live_runs import memory_of, tree_of
from marked import living, marked, started

PROGRAMS = Path(__file__).parent / "peer_programs"
sys.path.append(str(PROGRAMS))
import workload  # noqa: E402
from workload import RANKS  # noqa: E402

START_SECONDS = 180.0
SETTLED_SECONDS = 6.0
SPREAD_STEPS = 200
BEYOND_STEPS = 60
RECOVERY_SECONDS = 150.0


class RunError(Exception):
    """The run ended or took too long; the message is the last line that says why."""


class Line(NamedTuple):
    """A finished step of one rank (`workload.Record`)."""

    time: float
    pid: int
    rank: int
    ranks: int
    step: int
    counted: bool
    samples: tuple[int, ...]


@dataclass
class Trial:
    """The result of one launch and one kill, in seconds; None: the trial did not get that far.

    `next_step`: from the kill to the next step of all running ranks after which training continues.
    `all_ranks`: the same with the original number of ranks. `lost`: samples that were read but are not in the
    weights. `twice`: samples that are in the weights twice, or will be read again after a rank resumed from
    before them.
    """

    first_step: float
    megabytes: float
    rank: int
    step: int
    next_step: float | None = None
    all_ranks: float | None = None
    repeated_steps: int | None = None
    lost: int | None = None
    twice: int | None = None
    ended: str = ""


class Run:
    """A launch of `command` by a shell, in `folder`, with the records that its ranks write there."""

    def __init__(self, command: str, folder: Path, variables: Mapping[str, str]) -> None:
        self.folder, self.output = folder, folder / "output.txt"
        folder.mkdir(parents=True, exist_ok=True)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("TANDEM_", "RAY_"))}
        path = os.pathsep.join(filter(None, [str(PROGRAMS), kept.get("PYTHONPATH", "")]))
        self.environment = marked({**kept, "PYTHONPATH": path, workload.FOLDER: str(folder), **variables})
        self.lines: list[Line] = []
        self._offsets: dict[Path, int] = {}
        self.began = time.time()
        self.process = started(["bash", "-c", command], self.environment, self.output, folder)

    def read(self) -> list[Line]:
        """Return all lines so far, ordered by time."""
        new = []
        for path in self.folder.glob("steps-*.txt"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                found = file.read()
            whole = found[: found.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            pid = int(path.stem.removeprefix("steps-"))
            new += [_line(pid, text) for text in whole.decode().splitlines()]
        self.lines = sorted([*self.lines, *new]) if new else self.lines
        return self.lines

    def until(self, condition: Callable[[list[Line]], bool], what: str, limit: float) -> None:
        """Wait for the condition. Raises RunError after `limit` seconds, or if the launch ends."""
        deadline = time.monotonic() + limit
        while not condition(self.read()):
            code = self.process.poll()
            if code is not None:
                raise RunError(f"the job ended with {code}: {self.last_words()}")
            if time.monotonic() > deadline:
                raise RunError(f"no {what} in {limit:.0f} s: {self.last_words()}")
            time.sleep(0.02)

    def last_words(self) -> str:
        """Return the last line with an error, else the last line of output."""
        printed = self.output.read_text(errors="replace").splitlines()
        lines = [line.strip() for line in printed if line.strip()]
        errors = [line for line in lines if "Error" in line or "error:" in line]
        return (errors or lines or ["no output"])[-1][-300:]

    def processes(self) -> set[int]:
        """Return all processes that the launch has started, in any session."""
        known = {each.pid for each in living(self.environment)} | {self.process.pid}
        return {pid for each in known for pid in tree_of(each)}

    def megabytes(self) -> float:
        return sum(map(memory_of, self.processes())) / 2**20

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        for _again in range(3):  # what a supervisor has started meanwhile
            for pid in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        self.process.wait()


def _line(pid: int, text: str) -> Line:
    at, rank, ranks, step, counted, samples = text.split()
    numbers = tuple(map(int, samples.split(",")))
    return Line(float(at), pid, int(rank), int(ranks), int(step), counted == "1", numbers)


def trial(command: str, folder: Path, variables: Mapping[str, str], orders: Sequence[Sequence[int]]) -> Trial:
    """Launch, train, kill a rank, and judge the rest of the run.

    `orders`: the samples of each rank in the order of an uninterrupted run. Raises RunError if the run does
    not reach its first step.
    """
    with Run(command, folder, variables) as run:
        run.until(_all_ranks_have_begun, "first step", START_SECONDS)
        began = max(min(each.time for each in run.lines if each.rank == rank) for rank in range(RANKS))
        time.sleep(SETTLED_SECONDS)
        memory = run.megabytes()
        aim = run.read()[-1].step + random.randrange(1, SPREAD_STEPS)
        run.until(lambda lines: lines[-1].step >= aim, f"step {aim}", START_SECONDS)
        rank = random.randrange(RANKS)
        victim = next(each.pid for each in reversed(run.lines) if each.rank == rank)
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        found = Trial(began - run.began, memory, rank, _last(run.read(), killed))
        last = found.step
        try:
            run.until(lambda lines: _is_beyond(lines, killed, victim, last), "recovery", RECOVERY_SECONDS)
        except RunError as error:
            found.ended = str(error)
        judge(found, run.read(), killed, victim, orders)
        return found


def _all_ranks_have_begun(lines: Sequence[Line]) -> bool:
    return len({each.rank for each in lines if each.counted}) == RANKS


def _last(lines: Sequence[Line], killed: float) -> int:
    """Return the last step that counted before the kill."""
    return max(each.step for each in lines if each.counted and each.time <= killed)


def _is_beyond(lines: Sequence[Line], killed: float, victim: int, last: int) -> bool:
    """Return whether no sample that was read before the kill can still be used by any rank."""
    if not any(_whole_steps(lines, killed, victim, RANKS)):
        return False
    newest = {each.rank: each.step for each in lines if each.time > killed and each.pid != victim}
    return len(newest) == RANKS and min(newest.values()) >= last + BEYOND_STEPS


def _whole_steps(
    lines: Sequence[Line], killed: float, victim: int, ranks: int | None = None
) -> Iterator[tuple[float, int]]:
    """Return (time, step) of the steps after the kill that all running ranks finished, in order.

    `ranks`: only those with this number of ranks. A step that a survivor finished alone has a rank too few.
    """
    there: dict[tuple[int, int], set[int]] = {}
    for each in lines:
        if each.time <= killed or each.pid == victim or not each.counted or ranks not in (None, each.ranks):
            continue
        members = there.setdefault((each.step, each.ranks), set())
        if each.rank not in members and len(members) == each.ranks - 1:
            yield each.time, each.step
        members.add(each.rank)


def judge(
    found: Trial, lines: Sequence[Line], killed: float, victim: int, orders: Sequence[Sequence[int]]
) -> None:
    """Fill in the results from the records after the kill."""
    first = next(_whole_steps(lines, killed, victim), None)
    if first is None:
        return
    found.next_step = first[0] - killed
    found.repeated_steps = max(0, found.step + 1 - first[1])
    whole = next(_whole_steps(lines, killed, victim, RANKS), None)
    found.all_ranks = whole and whole[0] - killed
    places = [{sample: place for place, sample in enumerate(order)} for order in orders]
    weights = [in_the_weights(lines, rank) for rank in range(RANKS)]
    used = Counter(sample for each in weights for sample in each)
    again = sum(_read_again(*each) for each in zip(weights, places, strict=True))
    found.twice = sum(times - 1 for times in used.values()) + again
    reached = [max(at[sample] for sample in _read(lines, rank)) for rank, at in enumerate(places)]
    read = (sample for order, end in zip(orders, reached, strict=True) for sample in order[: end + 1])
    found.lost = sum(sample not in used for sample in read)


def in_the_weights(lines: Sequence[Line], rank: int) -> list[int]:
    """Return this rank's samples in the final weights. Going back to a step removes those after it."""
    steps: list[Line] = []
    for each in lines:
        if each.rank == rank and each.counted:
            while steps and steps[-1].step >= each.step:
                steps.pop()
            steps.append(each)
    return [sample for each in steps for sample in each.samples]


def _read_again(samples: Sequence[int], places: Mapping[int, int]) -> int:
    """Return how many samples this rank will read although they are in the weights already."""
    return sum(places[sample] > places[samples[-1]] for sample in samples) if samples else 0


def _read(lines: Sequence[Line], rank: int) -> Iterator[int]:
    """Return all samples that this rank has read, whether they counted or not."""
    return (sample for each in lines if each.rank == rank for sample in each.samples)
