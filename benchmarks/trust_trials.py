"""Test runs under conditions that were not intended: wrong clocks, a second launch, a signal at any moment.

    python benchmarks/trust_trials.py [clocks] [pairs] [signals] [secret] [--starts 5] [--pairs 20] \\
        [--signals 100] [--rounds 10]

Clocks: two nodes, one of which is seconds ahead or behind; in two of the starts a node is killed.
Pairs: two launches in one run directory, seconds apart; one is killed, or frozen and continued.
Secret: what a job secret costs two nodes that connect through this host's own address. Runs with and without
one alternate, and each round starts with the other. Measured are the speed, and then three killed ranks.
Signals: SIGTERM, SIGHUP, or SIGINT twice, at a random moment, also during a recovery or with a frozen agent.
"""

import argparse
import json
import os
import random
import signal
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from live_runs import LiveRun, session_of
from recovery_trials import recovery
from table import RESULTS, Row, refuse_changes, render, write
from tandem.timeouts import REPEAT_WINDOW_SECONDS

OFFSETS = (-30, -10, -6, -1, 10, 30)
STEPS = 600
FLAGS = ("--log-every", 20, "--threads", 1, "--steps", STEPS, "--lr", 0.01)
EVERY = ("--checkpoint-every", 50)
SHUTDOWN_SECONDS = 25
LIMIT = 400.0


def undisturbed(folder: Path, *flags: object) -> str:
    """Return the weights of an uninterrupted run of two ranks."""
    with LiveRun(("tandem", "launch", "--nproc", "2"), folder / "undisturbed", *FLAGS, *EVERY, *flags) as run:
        assert run.wait(LIMIT) == 0, run.words()
        return str(run.summary()["weights_sha256"])


def clocks(starts: int, kills: int, folder: Path) -> list[Row]:
    """Return a row for each offset."""
    weights, rows = undisturbed(folder), []
    for offset in OFFSETS:
        right = 0
        for start in range(starts):
            where = folder / f"clock{offset:+}-{start}"
            worlds, found = _two_nodes(offset, start < kills, where, 29_600 + start)
            wanted = [2, 2] if start < kills else [2]
            right += worlds == wanted and found == weights
        what = f"{starts} starts, {min(kills, starts)} kills"
        outcome = f"{right} of {starts} with the requested world size and the weights of an uninterrupted run"
        rows.append(
            Row(
                f"node 1's clock {offset:+} s",
                starts,
                f"{what}: {outcome}",
                target="all",
                passed=right == starts,
            )
        )
    return rows


def _two_nodes(offset: int, is_killed: bool, where: Path, port: int) -> tuple[list[int], str]:
    """Return the world sizes and the weights."""
    os.environ["CLOCK_SECONDS"] = str(offset)

    def node(number: int) -> LiveRun:
        place = ("--nodes", 2, "--master", f"127.0.0.101:{port}", "--node-rank", number, "--max-restarts", 0)
        launcher = ("shifted_clock" if number else "tandem", "launch")
        return LiveRun(launcher, where, *FLAGS, *EVERY, *place, "--task.delay", 0.02)

    nodes = [node(0), node(1)]
    try:
        if is_killed:
            nodes[0].until(lambda: bool(nodes[0].events("checkpoint")), "checkpoint", LIMIT)
            nodes[1].close()
            time.sleep(1)
            nodes[1] = node(1)
        codes = [each.wait(LIMIT) for each in nodes]
        assert codes == [0, 0], nodes[0].words()
        worlds = [int(event["world_size"]) for event in nodes[0].events("world")]
        return worlds, str(nodes[0].summary()["weights_sha256"])
    finally:
        for each in nodes:
            each.close()


def pairs(count: int, folder: Path) -> list[Row]:
    """Start two launches in one run directory; return one row."""
    weights, outcomes, wrong = undisturbed(folder), Counter[str](), []
    for pair in range(count):
        where = folder / f"pair-{pair}"
        launcher = ("tandem", "launch", "--nproc", "2")

        def launch(where: Path = where, launcher: Sequence[str] = launcher) -> LiveRun:
            return LiveRun(launcher, where, *FLAGS, *EVERY, "--task.delay", 0.02)

        first = launch()
        time.sleep(random.uniform(0, 5))
        with first, launch() as second:
            time.sleep(random.uniform(2, 20))
            victim = random.choice((first, second))
            if pair % 2:
                with _frozen(victim):
                    time.sleep(random.uniform(2, 45))
            else:
                victim.close()
            codes = [first.wait(LIMIT), second.wait(LIMIT)]
            ended = [code for code in codes if code != -signal.SIGKILL]
            if 0 not in codes:  # the owner was killed, and the other had gone before
                with launch() as third:
                    ended.append(third.wait(LIMIT))
            steps = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
            logged = [line["step"] for line in steps if "eval" not in line]
            saved = [event["step"] for event in first.events("checkpoint")]
            is_right = (
                ended.count(0) == 1
                and set(ended) <= {0, 2}
                and logged == sorted(set(logged))
                and saved == sorted(set(saved))
                and first.summary()["weights_sha256"] == weights
                and "Traceback" not in first.words(None)
            )
        outcomes["frozen" if pair % 2 else "killed"] += is_right
        if not is_right:
            wrong.append(f"pair {pair}: codes {codes}, then {ended}")
    for line in wrong:
        print(line)
    total = sum(outcomes.values())
    return [
        Row(
            "two launches in one run directory, 0 to 5 s apart",
            count,
            f"{total} of {count} with one owner at a time and the weights of a single run "
            f"(one killed: {outcomes['killed']}, one frozen and continued: {outcomes['frozen']})",
            target="all",
            passed=total == count,
        )
    ]


@contextmanager
def _frozen(run: LiveRun) -> Iterator[None]:
    """Stop all processes of a launch in this block; they continue afterward."""
    pids = [pid for pid, _ in session_of(run.process.pid)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGSTOP:
            yield


def signals(count: int, folder: Path) -> list[Row]:
    """Send a signal at a random moment; return a row for each kind."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, or in the background, runs would ignore both
    signal.signal(signal.SIGINT, signal.default_int_handler)
    long = ("--task.delay", 0.02, "--nodes", 2, "--shutdown-timeout", SHUTDOWN_SECONDS)
    began = time.monotonic()
    with LiveRun(("tandem", "launch"), folder / "whole", *FLAGS, *EVERY, *long) as run:
        assert run.wait(LIMIT) == 0, run.words()
    whole = time.monotonic() - began
    kinds = {"SIGTERM": [15], "SIGHUP": [1], "SIGINT twice": [2, 2]}
    right, seconds, wrong = Counter[str](), [0.0], []
    for trial in range(count):
        name = list(kinds)[trial % len(kinds)]
        temporary = folder / f"tmp-{trial}"
        temporary.mkdir()
        os.environ["TMPDIR"] = str(temporary)
        shared = set(os.listdir("/dev/shm"))
        with LiveRun(("tandem", "launch"), folder / f"signal-{trial}", *FLAGS, *EVERY, *long) as run:
            time.sleep(random.uniform(0, whole))
            _make_it_harder(run, trial)
            hit = time.monotonic()
            for number in kinds[name]:
                with suppress(ProcessLookupError):
                    run.process.send_signal(number)
                time.sleep(REPEAT_WINDOW_SECONDS + 0.2)  # sooner, it counts as the same one
            code = run.wait(LIMIT)
            took = time.monotonic() - hit
            gone = _soon(lambda run=run: not session_of(run.process.pid))  # type: ignore[misc]
            left = sorted(set(os.listdir("/dev/shm")) - shared)
            problems = [
                what
                for what, is_so in {
                    f"took {took:.1f} s": took > SHUTDOWN_SECONDS + 5,
                    "a traceback": "Traceback" in run.words(None),
                    "an orphan": not gone,
                    f"in the temporary folder: {_left_in(temporary)}": bool(_left_in(temporary)),
                    f"in /dev/shm: {left}": bool(left),
                    f"code {code}": code not in (0, 143, 129, 130, 137, -15, -1, -2),
                    "not saved": code in (143, 137) and _is_unsaved(run),
                }.items()
                if is_so
            ]
        right[name] += not problems
        seconds.append(took)
        if problems:
            wrong.append(f"trial {trial}, {name}: {'; '.join(problems)}")
    os.environ.pop("TMPDIR")
    for line in wrong:
        print(line)
    rows = []
    for place, name in enumerate(kinds):
        tries = len(range(place, count, len(kinds)))
        outcome = f"{right[name]} of {tries} ended in time, saved, no traceback, no orphan, nothing left"
        passed = right[name] == tries
        rows.append(Row(f"{name} at a random moment", tries, outcome, target="all", passed=passed))
    worst, limit = max(seconds), SHUTDOWN_SECONDS + 5
    rows.append(
        Row(
            "from the signal to the end",
            count,
            f"at most {worst:.1f} s",
            target=f"{limit} s",
            passed=worst <= limit,
        )
    )
    return rows


def _make_it_harder(run: LiveRun, trial: int) -> None:
    """Make every fourth trial hit a recovery, and every fourth a run with a frozen agent."""
    with suppress(ProcessLookupError):
        if trial % 4 == 1 and run.ranks():
            os.kill(random.choice(list(run.ranks().values())), signal.SIGKILL)
            time.sleep(random.uniform(0, 0.5))
        elif trial % 4 == 3 and 1 in run.agents():
            os.kill(run.agents()[1], signal.SIGSTOP)


def _is_unsaved(run: LiveRun) -> bool:
    if not run.events("training"):
        return False
    summary = run.summary()
    return bool(summary["global_step"]) and summary["last_checkpoint_step"] != summary["global_step"]


def _left_in(temporary: Path) -> list[str]:
    """Return the files that are left, except torch's cache of compiled code, which is the user's."""
    return [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")]


def _soon(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def secret(rounds: int, folder: Path) -> list[Row]:
    """Return two rows: speed and recovery with a secret, relative to those without."""
    steps = {True: list[float](), False: list[float]()}
    recoveries = {True: list[float](), False: list[float]()}
    for number in range(rounds):
        for has_secret in (number % 2 == 0, number % 2 == 1):
            where = folder / f"{number}-{'with' if has_secret else 'without'}"
            pace, lost = _costs(where, has_secret, 20_000 + random.randrange(10_000))
            steps[has_secret].append(pace)
            recoveries[has_secret] += lost
    rows = []
    for what, found, limit in (("a step", steps, 1.005), ("a rank killed", recoveries, 1.1)):
        ours, theirs = statistics.median(found[True]), statistics.median(found[False])
        pairs = [one / other for one, other in zip(found[True], found[False], strict=True)]
        spread = statistics.quantiles(pairs, n=4)
        rows.append(
            Row(
                f"{what}, with a job secret",
                len(found[True]),
                f"median {1000 * ours:.2f} ms, quartiles of the ratio {spread[0]:.3f} to {spread[2]:.3f}",
                f"without: median {1000 * theirs:.2f} ms",
                f"ratio {ours / theirs:.4f}",
                f"at most {limit}",
                ours / theirs <= limit,
                len(found[False]),
                ours,
                theirs,
            )
        )
    return rows


def _costs(where: Path, has_secret: bool, port: int) -> tuple[float, list[float]]:
    """Return the seconds of a step (median of rank 0's log lines), and of each of three recoveries."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect(("192.0.2.1", 9))  # sends nothing: which address would be this host's
        host = asked.getsockname()[0]
    variables = {"GLOO_SOCKET_IFNAME": "lo", **({"TANDEM_JOB_SECRET": "x" * 32} if has_secret else {})}
    flags = ("--log-every", 20, "--threads", 1, "--steps", 10_000_000, "--lr", 0.01, *EVERY, "--nodes", 2)
    nodes = [
        LiveRun(
            ("tandem", "launch"),
            where,
            *(*flags, "--master", f"{host}:{port}", "--node-rank", number, "--max-restarts", 100),
            variables=variables,
        )
        for number in (0, 1)
    ]
    try:
        nodes[0].until(lambda: len(_paces(where)) >= 50, "fifty log lines", LIMIT)
        found = statistics.median(_paces(where)[5:50])
        return found, [recovery(nodes[0], list(nodes[1].ranks().values())[0]) for _ in range(3)]
    finally:
        for each in nodes:
            each.close()


def _paces(where: Path) -> list[float]:
    """Return the seconds per step in each log line so far."""
    with suppress(FileNotFoundError):
        lines = (where / "metrics.jsonl").read_text().splitlines()
        return [240 / json.loads(line)["samples_per_second"] for line in lines[:50] if line.endswith("}")]
    return []


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="*", default=["clocks", "pairs", "signals", "secret"])
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--signals", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    refuse_changes()
    with tempfile.TemporaryDirectory(prefix="tandem-trust-") as name:
        trials: dict[str, Callable[[Path], list[Row]]] = {
            "clocks": lambda place: clocks(asked.starts, asked.kills, place),
            "pairs": lambda place: pairs(asked.pairs, place),
            "signals": lambda place: signals(asked.signals, place),
            "secret": lambda place: secret(asked.rounds, place),
        }
        for which in asked.which:
            (folder := Path(name) / which).mkdir()
            rows = trials[which](folder)
            print(render(rows), flush=True)
            write(rows, RESULTS / f"trust_{which}.json")
