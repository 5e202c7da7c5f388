"""Kill and stop scripts that do not use tandem's API: `tandem launch` compared with torchrun.

    python benchmarks/script_trials.py [--trials 20] [--controls 5] [--json FILE] [name ...]

The scripts are those of tests/scripts/programs, with two ranks over gloo: on two simulated nodes under
`tandem launch`, on one node under torchrun. In turn, a random rank is killed (SIGKILL) or stopped (SIGSTOP)
after the first step. A kill waits until the standby processes are ready, whose imports take some seconds; a
stop does not. Each script prints the time when its imports are done as its first line. Scripts of frameworks
run with the interpreter FRAMEWORKS_PYTHON (`make frameworks`). Rows of scripts that are not selected stay in
the file.
"""

import argparse
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from marked import started
from table import Row, render, write
from tandem.process import below

PROGRAMS = Path(__file__).parents[1] / "tests" / "scripts" / "programs"
SCRIPTS = {
    "ddp_tutorial": sys.executable,
    "imagenet_structure": sys.executable,
    "with_accelerate": os.environ.get("FRAMEWORKS_PYTHON", sys.executable),
    "with_lightning": os.environ.get("FRAMEWORKS_PYTHON", sys.executable),
    "with_transformers": os.environ.get("FRAMEWORKS_PYTHON", sys.executable),
}
ENDLESS = ("--epochs", "1000000", "--pause", "0.03")
FIRST_LINE = re.compile(r"^first line (\S+) pid (\d+) rank (\d)$", re.M)
BETWEEN = (0.5, 4.0)  # seconds of training before the next kill or stop
HANG_SECONDS = 3.0
LIMIT_SECONDS = 240.0
TARGET = 5.0


class ScriptRun:
    """One launch of a script in its own session; its first lines appear in `outputs`."""

    def __init__(self, command: Sequence[str], name: str, folder: Path, outputs: Sequence[Path]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.script, self.outputs, self.said = PROGRAMS / f"{name}.py", outputs, folder / "terminal.txt"
        kept = {key: value for key, value in os.environ.items() if not key.startswith("TANDEM_")}
        kept["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # without it torchrun's restarts often hang
        words = [SCRIPTS[name], "-m", *command, str(self.script), *ENDLESS]
        self.process = started(words, kept, self.said, folder)

    def lives(self) -> dict[int, list[tuple[float, int]]]:
        """Return {rank: [(time of the first line, process)]}, in the order of generations."""
        found: dict[int, list[tuple[float, int]]] = {0: [], 1: []}
        for path in self.outputs:
            for at, pid, rank in FIRST_LINE.findall(path.read_text() if path.exists() else ""):
                found[int(rank)].append((float(at), int(pid)))
        return found

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait for the condition. Raises RuntimeError with the last output after a limit or the end."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (found := condition()):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"no {what}; last words:\n{self.said.read_text(errors='replace')[-3000:]}")
            time.sleep(0.01)
        return found

    def until_all_live(self, number: int) -> float:
        """Return when (Unix seconds) the last rank of generation `number`, from 0, printed its first line."""
        self.until(lambda: min(map(len, self.lives().values())) > number, f"generation {number}")
        return max(each[number][0] for each in self.lives().values())

    def ready(self) -> int:
        """Return the number of standby processes that are ready."""
        return sum(each.name == "tandem-standby" for each in below(self.process.pid))

    def hit(self, number: signal.Signals) -> tuple[int, float]:
        """Send a signal to a random rank of the running generation; return (rank, time)."""
        time.sleep(random.uniform(*BETWEEN))
        rank = random.choice((0, 1))
        at = time.time()
        os.kill(self.lives()[rank][-1][1], number)
        return rank, at

    def stop(self, limit: float = 60.0) -> int:
        """Send SIGTERM, and return the exit code; a negative one if it had to be killed."""
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(limit)
        return -1

    def __enter__(self) -> "ScriptRun":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop(20.0)
        ranks = [each[-1][1] for each in self.lives().values() if each]  # torchrun gives each a session
        for kill, pid in ((os.killpg, self.process.pid), *((os.kill, pid) for pid in ranks)):
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        self.process.wait()


class UnderTandem(ScriptRun):
    """A launch with two simulated nodes."""

    def __init__(self, name: str, folder: Path) -> None:
        self.run_dir, self.port = folder / "run", free_port()
        settings = ["--nodes", "2", "--run-dir", str(self.run_dir), "--metrics", str(self.port)]
        settings += ["--metrics-linger", "0", "--max-restarts", "10000", "--hang-timeout", str(HANG_SECONDS)]
        logs = [self.run_dir / "log" / f"rank-{rank}.log" for rank in (0, 1)]
        super().__init__(["tandem", "launch", *settings], name, folder, logs)

    def metric(self, series: str) -> float:
        """Return a metric's value on the page, 0 if there is none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as page:
                found = re.search(rf"^{re.escape(series)} (\S+)$", page.read().decode(), re.M)
                return float(found[1]) if found else 0.0
        except OSError:
            return 0.0

    def hangs(self) -> list[dict[str, Any]]:
        """Return the lines of events.jsonl about hangs."""
        path = self.run_dir / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [event for event in events if event["kind"] == "hang"]

    def until_steps(self) -> None:
        self.until(lambda: self.metric("tandem_global_step") >= 1, "first step")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Trials:
    """The results of the kills and stops of one script."""

    def __init__(self, name: str, trials: int, controls: int, folder: Path) -> None:
        self.name, self.trials, self.controls = name, trials, controls
        self.ours: list[float] = []
        self.named, self.delays, self.wrong = 0, list[float](), list[str]()
        print(f"{name} under tandem ...", file=sys.stderr, flush=True)
        with UnderTandem(name, folder / "tandem") as run:
            self._kills_and_stops(run)
        print(f"{name} under torchrun ...", file=sys.stderr, flush=True)
        output = folder / "torchrun" / "terminal.txt"
        command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", str(controls)]
        self.theirs: list[float] = []
        with ScriptRun(command, name, folder / "torchrun", [output]) as run, suppress(RuntimeError, OSError):
            for number in range(controls):  # as far as it goes: some of its restarts fail by themselves
                self.theirs.append(self._restart_of_torchrun(run, number))

    def _kills_and_stops(self, run: UnderTandem) -> None:
        kinds = [signal.SIGKILL, signal.SIGSTOP] * self.trials
        for number, kind in enumerate(kinds):
            run.until_all_live(number)
            run.until_steps()
            if kind == signal.SIGKILL:
                run.until(lambda: run.ready() >= 2, "processes on standby")
            rank, at = run.hit(kind)
            if kind == signal.SIGSTOP:
                self._judge_hang(run, rank, at, number // 2)
            reached = run.until_all_live(number + 1)
            if kind == signal.SIGKILL:
                self.ours.append(reached - at)
        run.until_steps()
        self.generations = max(map(len, run.lives().values()))
        told = [run.metric(f'tandem_restarts_total{{reason="{why}"}}') for why in ("crash", "hang")]
        self.page_is_right = [*told, run.metric("tandem_world_size")] == [self.trials, self.trials, 2]
        self.code = run.stop()

    def _judge_hang(self, run: UnderTandem, rank: int, at: float, seen: int) -> None:
        run.until(lambda: len(run.hangs()) > seen, "hang")
        event = run.hangs()[seen]
        place = re.fullmatch(rf"{re.escape(run.script.name)}:(\d+)", event["phase"])
        lines = run.script.read_text().splitlines()
        in_script = place is not None and lines[int(place[1]) - 1].strip() != ""
        if (event["rank"], event["node"]) == (rank, rank) and in_script:
            self.named += 1
            self.delays.append(event["time"] - at - HANG_SECONDS)
        else:
            self.wrong.append(f"rank {rank} was stopped, named: {event}")
            print(self.wrong[-1], file=sys.stderr, flush=True)

    def _restart_of_torchrun(self, run: ScriptRun, number: int) -> float:
        run.until_all_live(number)
        time.sleep(3.0)  # nothing tells of its first step
        _, at = run.hit(signal.SIGKILL)
        return run.until_all_live(number + 1) - at

    def rows(self) -> list[Row]:
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs or [0.0])
        unasked = self.generations - 1 - 2 * self.trials
        worst = f"worst {max(self.delays):.2f} s" if self.delays else "none"
        return [
            Row(
                f"{self.name}: a rank killed, to the first output line of all ranks",
                self.trials,
                f"{len(self.ours)} of {self.trials} recover, median {ours:.2f} s, "
                f"worst {max(self.ours):.2f} s",
                f"torchrun, {len(self.theirs)} of {self.controls} kills: median {theirs:.2f} s, "
                f"best {min(self.theirs, default=0.0):.2f} s",
                f"{theirs / ours:.1f} times faster",
                f"all, {TARGET:g} times",
                len(self.ours) == self.trials and theirs >= TARGET * ours,
                len(self.theirs),
                ours,
                theirs if self.theirs else None,
            ),
            Row(
                f"{self.name}: a rank frozen, reported by rank, node and line",
                self.trials,
                f"{self.named} of {self.trials} reported correctly, {worst} after the timeout; "
                f"{unasked} unexpected restarts, SIGTERM then {self.code}",
                target="all, none, 143",
                passed=self.named == self.trials and not unasked and self.code == 143 and self.page_is_right,
                seconds=statistics.median(self.delays) if self.delays else None,
            ),
        ]


def rows(names: Sequence[str], trials: int, controls: int, path: Path | None) -> list[Row]:
    known: list[Row] = []
    if path is not None and path.exists():
        known = [Row(**row) for row in json.loads(path.read_text())["rows"]]
    with tempfile.TemporaryDirectory(prefix="tandem-scripts-") as folder:
        for name in names:
            new = Trials(name, trials, controls, Path(folder, name)).rows()
            known = [row for row in known if not row.name.startswith(f"{name}:")] + new
            known.sort(key=lambda row: list(SCRIPTS).index(row.name.partition(":")[0]))
            if path is not None:
                write(known, path)
    return known


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(SCRIPTS), metavar="name")
    parser.add_argument("--trials", type=int, default=20, help="kills, and as many stops, of each script")
    parser.add_argument("--controls", type=int, default=5, help="kills of each script under torchrun")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    asked = parser.parse_args()
    unknown = sorted(set(asked.names) - set(SCRIPTS))
    if unknown:
        parser.error(f"no script {unknown[0]}; there are {', '.join(SCRIPTS)}")
    found = rows(asked.names, asked.trials, asked.controls, asked.json)
    print(render(found))
    sys.exit(int(not all(row.passed for row in found)))
