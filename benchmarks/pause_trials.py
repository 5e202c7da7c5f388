"""Suspend runs: is no rank reported, does no rank restart, and are the bits the same?

    python benchmarks/pause_trials.py [--count 100] [--longest 60]

Processes are stopped with SIGSTOP for 3 to 60 seconds at a random moment, several times in each run: the
whole tree (as with Ctrl-Z, `docker pause` and `scontrol suspend`), the agent of one node, or one rank. A
single rank that is stopped for longer than --hang-timeout is a hang: exactly this rank must then be reported.
"""

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from live_runs import LiveRun, tree_of
from table import Row, render

SHORTEST_SECONDS, STEP_SECONDS = 3.0, 0.02
HANG_SECONDS = 10.0  # of `--hang-timeout auto`, for a process that is stopped
SLACK_SECONDS = (
    4.0  # until all is as before on a busy machine, so that the next pause finds a run that trains
)
SHAPES = tuple((nodes, strategy) for nodes in (1, 2) for strategy in ("ddp", "fsdp"))
FLAGS = ("--checkpoint-every", 200, "--log-every", 1000, "--threads", 1, "--lr", 0.01, "--max-restarts", 1000)

Victims = Callable[[LiveRun, random.Random], list[int]]


def whole_tree(run: LiveRun, _chance: random.Random) -> list[int]:
    """All processes of the launch."""
    return tree_of(run.process.pid)


def one_agent(run: LiveRun, chance: random.Random) -> list[int]:
    """The agent of one node; its ranks train on."""
    return [chance.choice(sorted(run.agents().values()) or [run.process.pid])]


def one_rank(run: LiveRun, chance: random.Random) -> list[int]:
    """One rank: the others wait for it."""
    return [chance.choice(sorted(run.ranks().values()))]


KINDS: dict[str, Victims] = {"whole tree": whole_tree, "one agent": one_agent, "one rank": one_rank}


def pauses(kind: str, nodes: int, strategy: str, lengths: list[float], folder: Path, seed: int) -> Row:
    """As many pauses as there are `lengths`, in one run of that shape."""
    chance = random.Random(seed)
    asleep = sum(lengths)
    awake = sum(chance.uniform(1.0, 4.0) + SLACK_SECONDS for _ in lengths)
    trains_on = kind == "one agent"
    steps = int(((asleep if trains_on else 0) + awake + 10) / STEP_SECONDS) // 2
    flags = (*FLAGS, "--steps", steps, "--strategy", strategy)
    calm = _weights(folder / "calm", flags)
    hung, expected = 0, 0
    where = ("--nodes", "2") if nodes == 2 else ("--nproc", "2")
    with LiveRun(("tandem", "launch", *where), folder / "run", *flags, "--task.delay", STEP_SECONDS) as run:
        run.until(lambda: bool(run.events("training")), "first step")
        done = 0
        for length in lengths:
            time.sleep(chance.uniform(1.0, 4.0))
            if run.process.poll() is not None:
                break
            before = len(run.events("hang"))
            _pause(KINDS[kind](run, chance), length)
            done += 1
            time.sleep(SLACK_SECONDS)
            is_hang = kind == "one rank" and length > HANG_SECONDS
            expected += is_hang
            hung += len(run.events("hang")) - before
            if is_hang:
                run.until(lambda: len(run.events("training")) > len(run.events("hang")), "next generation")
        code = run.wait(60 + 4 * steps * STEP_SECONDS)
        summary = run.summary()
        restarts = int(summary["restarts"])
    same = code == 0 and summary["weights_sha256"] == calm
    said = [path.read_text() for path in (folder / "run" / "log").glob("node-*.log")]
    unheard = sum(text.count("agent has sent no heartbeat") for text in said)
    return Row(
        f"{kind} paused, {nodes} node{'s' * (nodes > 1)}, {strategy}",
        done,
        f"{hung - expected} false hangs, {restarts - expected} restarts; weights "
        f"{'equal' if same else 'DIFFER'} (code {code}); {min(lengths):.0f} to {max(lengths):.0f} s"
        + (f"; {expected} pauses of a rank over {HANG_SECONDS:g} s named" if kind == "one rank" else "")
        + (f"; {unheard} times an agent that cannot be heard" if kind == "one agent" else ""),
        target="no false hang, weights equal",
        passed=same and hung == expected and restarts == expected,
    )


def _pause(pids: list[int], seconds: float) -> None:
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(seconds)


def _weights(run_dir: Path, flags: tuple[object, ...]) -> object:
    with LiveRun(("tandem", "launch", "--nproc", "2"), run_dir, *flags, "--task.delay", 0) as run:
        run.wait(1200)
        return run.summary()["weights_sha256"]


def rows(count: int, longest: float = 60.0, seed: int = 0) -> list[Row]:
    """`count` pauses, spread over all kinds and shapes; fewer than those leave out the last of them."""
    chance, found = random.Random(seed), []
    cells = [(kind, *shape) for shape in SHAPES for kind in KINDS][:count]
    for index, (kind, nodes, strategy) in enumerate(cells):
        number = count // len(cells) + (index < count % len(cells))
        lengths = [round(chance.uniform(SHORTEST_SECONDS, longest), 1) for _ in range(number)]
        with tempfile.TemporaryDirectory(prefix="tandem-pauses-") as name:
            found.append(pauses(kind, nodes, strategy, lengths, Path(name), seed + index))
        print(render(found[-1:]).splitlines()[-1], flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--longest", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(render(rows(asked.count, asked.longest, asked.seed)))
