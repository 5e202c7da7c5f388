"""Check that every process below a rank ends with the rank, for programs that start their own processes.

    python benchmarks/child_trials.py [--rounds 5] [--limit 2.0] [--json FILE] [kind ...]

Kinds: a bash wrapper, a launcher inside the launch (as with `accelerate launch`), children of mp.spawn,
workers of subprocess.Popen, a daemon (double fork, its own session, ignores SIGTERM), and loader processes.
Each round launches every kind twice, with two ranks. In the first launch, a rank is killed (SIGKILL); in the
next generation, a rank is stopped until it is reported as a hang; in the one after that, the launch gets
SIGTERM. The second launch is killed itself. Within `--limit` seconds after each of these ends, all processes
that the ranks had started must be gone. A command (the wrapper) sends no heartbeats, so it is not tested for
hangs. One round has 23 ends.
"""

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from marked import living, marked, started
from table import Row, finish

LIMIT_SECONDS = 240.0
HANG_SECONDS = 3
OURS = ("tandem-forks", "tandem-standby", "tandem-warming")

LEAF = """
import os, signal, sys, time

def stop(*_):
    open(f"saved-{os.getpid()}", "w").close()
    sys.exit(0)

def work(number=0, *_):
    place = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}-{number}"
    open(f"ready-{place}", "w").close()
    while True:
        time.sleep(0.05)

if __name__ == "__main__":
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, stop)
    work(sys.argv[1])
"""
WRAPPER = """#!/bin/bash
export MY_SETTING=1
"$PYTHON" leaf.py 0
echo "python ended with $?"
"""
NESTED = """
import subprocess, sys
sys.exit(subprocess.Popen([sys.executable, "leaf.py", "0"]).wait())
"""
SPAWN = """
import multiprocessing, signal
from leaf import work
if __name__ == "__main__":
    own = multiprocessing.get_context("spawn")
    children = [own.Process(target=work, args=(number,)) for number in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
"""
POPEN = """
import subprocess, sys
from leaf import work
helpers = [subprocess.Popen([sys.executable, "leaf.py", str(number)]) for number in (1, 2)]
work(0)
"""
DAEMON = """
import os, subprocess, sys
from leaf import work
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.closerange(3, 1024)
    os.execv(sys.executable, [sys.executable, "leaf.py", "1", "deaf"])
work(0)
"""
LOADERS = """
import os, time, torch
from torch.utils.data import DataLoader
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 10**9
    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.zeros(1)
for number, batch in enumerate(DataLoader(Rows(), num_workers=2)):
    if number == 2:
        open(f"ready-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}-0", "w").close()
"""
KINDS: dict[str, tuple[str, str, int]] = {  # what it is in, its text, how many of a rank's say that they run
    "wrapper": ("start.sh", WRAPPER, 1),
    "nested": ("nested.py", NESTED, 1),
    "spawn": ("spawn.py", SPAWN, 2),
    "popen": ("popen.py", POPEN, 3),
    "daemon": ("daemon.py", DAEMON, 2),
    "loaders": ("loaders.py", LOADERS, 1),
}


class ChildRun:
    """One launch of a kind, in its own directory."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        name, text, self.leaves = KINDS[kind]
        folder.mkdir(parents=True)
        (folder / "leaf.py").write_text(LEAF)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
        environ = {key: value for key, value in os.environ.items() if not key.startswith("TANDEM_")}
        self.environ = marked({**environ, "PYTHON": sys.executable})
        words = ["--nproc", "2", "--run-dir", "run", "--metrics", "0", "--metrics-linger", "0"]
        words += ["--hang-timeout", str(HANG_SECONDS), "--shutdown-timeout", "20"]
        words += ["--", f"./{name}"] if name.endswith(".sh") else [name]
        command = [sys.executable, "-m", "tandem", "launch", *words]
        self.process = started(command, self.environ, folder / "said.txt", folder)

    def said(self) -> str:
        return (self.folder / "said.txt").read_text(errors="replace")

    def until(self, condition: Callable[[], Any], what: str, limit: float = LIMIT_SECONDS) -> None:
        """Wait until the condition holds. Raises RuntimeError if it does not."""
        deadline = time.monotonic() + limit
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.kind}: no {what}; said:\n{self.said()[-3000:]}")
            time.sleep(0.02)

    def until_ready(self, generation: int) -> dict[int, str]:
        """Wait for all processes that the ranks of a generation start; return {pid: name} with the ranks."""
        wanted = 2 * self.leaves
        self.until(lambda: len(list(self.folder.glob(f"ready-{generation}-*"))) >= wanted, "ready processes")
        return {each.pid: each.name for each in living(self.environ) if self._is_below_rank(each)}

    def _is_below_rank(self, each: Any) -> bool:
        return each.session != self.process.pid and each.name not in OURS

    def ranks(self) -> list[int]:
        """The ranks of the last generation, from the agent's log."""
        return [int(pid) for pid in re.findall(r"is process (\d+)$", self.said(), re.M)][-2:]

    def gone_after(self, pids: dict[int, str], limit: float) -> tuple[float, list[str]]:
        """Return (seconds until no process is alive, those still alive after `limit`)."""
        began = time.monotonic()
        while True:
            left = [each for each in living(self.environ) if each.pid in pids]
            seconds = time.monotonic() - began
            if not left or seconds > limit:
                return seconds, [f"{each.name} ({each.pid})" for each in left]
            time.sleep(0.01)

    def close(self) -> None:
        for each in living(self.environ):
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
        self.process.wait()


class Trials:
    """The results of all ends, by kind and by way of ending."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.found: dict[tuple[str, str], list[tuple[float, list[str]]]] = {}

    def judge(self, run: ChildRun, way: str, pids: dict[int, str]) -> None:
        seconds, left = run.gone_after(pids, self.limit)
        self.found.setdefault((run.kind, way), []).append((seconds, left))
        print(
            f"{run.kind}, {way}: {len(pids)} processes, {seconds:.2f} s {left or ''}",
            file=sys.stderr,
            flush=True,
        )

    def go_on_and_stop(self, kind: str, folder: Path) -> None:
        """Kill a rank, cause a hang, then send SIGTERM."""
        run = ChildRun(kind, folder)
        try:
            pids = run.until_ready(generation := 0)
            os.kill(random.choice(run.ranks()), signal.SIGKILL)
            self.judge(run, "KILL of a rank", pids)
            pids = run.until_ready(generation := generation + 1)
            if kind != "wrapper":
                time.sleep(1.0)  # until each has been heard once
                hung = random.choice(run.ranks())
                os.kill(hung, signal.SIGSTOP)
                run.until(lambda: "hang: " in run.said(), "hang")
                self.judge(run, "a hang", pids)
                pids = run.until_ready(generation := generation + 1)
            run.process.terminate()
            code = run.process.wait(LIMIT_SECONDS)
            pids |= {each.pid: each.name for each in living(run.environ)}
            self.judge(run, "TERM", pids)
            saved = len(list(folder.glob("saved-*")))
            if code != 143 or (kind in ("wrapper", "nested") and saved != 2):
                told = f"code {code}, {saved} saved; {run.said()[-1000:]}"
                self.found[kind, "TERM"].append((0.0, [told]))
        finally:
            run.close()

    def kill_launch(self, kind: str, folder: Path) -> None:
        run = ChildRun(kind, folder)
        try:
            run.until_ready(0)
            pids = {each.pid: each.name for each in living(run.environ)}
            run.process.kill()
            run.process.wait()
            self.judge(run, "KILL of the launch", pids)
        finally:
            run.close()

    def rows(self) -> list[Row]:
        rows = []
        for (kind, way), ends in sorted(self.found.items()):
            left = [who for _, others in ends for who in others]
            worst = max(seconds for seconds, _ in ends)
            outcome = f"{sum(not others for _, others in ends)} of {len(ends)} end, worst {worst:.2f} s"
            outcome += f"; left: {', '.join(left)[:300]}" if left else ""
            rows.append(
                Row(f"{kind}: {way}", len(ends), outcome, target=f"all, {self.limit:g} s", passed=not left)
            )
        return rows


def rows(kinds: list[str], rounds: int, limit: float) -> list[Row]:
    trials = Trials(limit)
    with tempfile.TemporaryDirectory(prefix="tandem-children-") as folder:
        for number in range(rounds):
            for kind in kinds:
                trials.go_on_and_stop(kind, Path(folder, f"{kind}-{number}"))
                trials.kill_launch(kind, Path(folder, f"{kind}-{number}-killed"))
    return trials.rows()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", default=list(KINDS), metavar="kind", help=", ".join(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=2.0, help="seconds")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    sys.exit(finish(rows(asked.kinds, asked.rounds, asked.limit), asked.json))
