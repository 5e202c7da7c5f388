"""Prove bit-exact resume: SIGKILL at 25 random steps at each of 1, 2, 3 and 4 ranks, and a baseline.

    python benchmarks/resume_trials.py [--trials 25] [--control 10] [--worlds 1,2,3,4] [--device cpu]

A trial is a SIGKILL at a random step, of every process (restarted by hand) or of one rank (restarted by the
agent). A run of hard_task.py, with 40 steps and 12 per epoch, gets KILLS_PER_RUN of them. At its end it is
compared with an uninterrupted run with the same options: SHA-256 of weights, of optimizer, scheduler and loss
scaler, and of the loss log. If they differ, all trials of the run count as failed.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from table import Row, finish
from tandem.signals import StopFlag
from tandem.verify.outcome import Outcome
from tandem.verify.resume import STEPS, Runner, Trial
from tandem.verify.watched_run import Kill, NothingResumedError

HERE = Path(__file__).parent
COMMON = ("--task", f"{HERE / 'hard_task.py'}:Hard", "--batch-size", "24", "--lr", "0.05")
COMMON += ("--eval-every", "15", "--threads", "1")
KILLS_PER_RUN = 5
OPTIONS: dict[str, tuple[str, ...]] = {
    "momentum, warm-up": ("--warmup", "10%"),
    "adamw, accumulation, clipping": (
        *("--optimizer", "adamw", "--lr", "0.001", "--micro-batch-size", "5", "--clip-norm", "1"),
        *("--warmup", "5", "--schedule", "linear"),
    ),
    "fp16 with accumulation": ("--precision", "fp16", "--micro-batch-size", "3", "--clip-norm", "1"),
    "own optimizer and scheduler": ("--task.own", "true"),
    "bf16, loader process, skipped steps": (
        *("--precision", "bf16", "--workers", "1"),
        *("--task.spoiled", "true", "--on-nonfinite", "skip"),
    ),
}
LIMIT_SECONDS = 180
# Without it the restarted ranks find the addresses of the dead ones, and the naive run does not go on at all.
RESTART = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def exact_resume(
    worlds: Sequence[int] = (1, 2, 3, 4), trials: int = 25, control: int = 10, device: str = "cpu"
) -> list[Row]:
    """Return a row for each world size, with the baseline at 3 ranks. Log every trial on stderr.

    With `device` cuda, the ranks are on one node with a GPU each, and batch norm is synchronized.
    """
    rows = []
    for world_size in worlds:
        equal = _trials_at(world_size, trials, device)
        beside = ""
        if world_size == 3 and control:
            same = sum(naive_ddp(world_size, control))
            beside = f"naive DDP: {same} of {control} equal"
        rows.append(
            Row(
                f"bit-exact resume, {world_size} rank{'s' * (world_size > 1)}",
                trials,
                f"{equal} of {trials} equal",
                beside,
                target="all",
                passed=equal == trials,
                control_trials=control if beside else None,
            )
        )
    return rows


def _trials_at(world_size: int, trials: int, device: str) -> int:
    """Return how many of `trials` kills left no difference."""
    chance, equal, done = random.Random(), 0, 0
    with tempfile.TemporaryDirectory(prefix="tandem-resume-") as folder:
        for number in range(-(-trials // KILLS_PER_RUN)):
            name = list(OPTIONS)[(number + world_size) % len(OPTIONS)]  # a few trials see other ones
            arguments = [*COMMON, *OPTIONS[name], "--nproc", str(world_size), "--device", device]
            arguments += ["--sync-batchnorm"] if device == "cuda" else []
            place = Path(folder) / str(number)
            place.mkdir()
            runner = Runner(arguments, os.environ, place, STEPS, StopFlag())
            trial = killed_run(runner, runner.uninterrupted(), min(KILLS_PER_RUN, trials - done), chance)
            done += len(trial.kills)
            equal += len(trial.kills) if trial.difference is None else 0
            say(f"{world_size} ranks, {name}: {trial}")
    return equal


def killed_run(runner: Runner, calm: Outcome, kills: int, chance: random.Random) -> Trial:
    """Run with kills at random steps; the first one kills every process."""
    while True:
        steps = sorted(chance.randrange(1, STEPS - 3) for _ in range(kills))
        ranks = [None, *(chance.randrange(calm.world_size) for _ in steps[1:])]
        plan = [Kill(step, rank) for step, rank in zip(steps, ranks, strict=True)]
        try:
            return runner.trial(calm, plan, save_every=chance.randint(1, 5))
        except NothingResumedError:
            say("a run was over before its last kill: again")


def naive_ddp(world_size: int, trials: int) -> Iterator[bool]:
    """Return whether the baseline, naive_ddp.py, ends with the same weights after a kill."""
    calm = _naive_weights(world_size, 0)[0]
    for _ in range(trials):
        kill_at = random.randrange(6, 40)
        weights, resumed_from = _naive_weights(world_size, kill_at)
        say(f"naive DDP, {world_size} ranks: killed at {kill_at}, from {resumed_from}: {weights == calm}")
        yield weights == calm


def _naive_weights(world_size: int, kill_at: int) -> tuple[str, str]:
    with tempfile.TemporaryDirectory(prefix="tandem-naive-") as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        script = [str(HERE / "naive_ddp.py"), folder, str(kill_at or -1)]
        subprocess.run(
            [sys.executable, *launcher, "--max-restarts", "1", *script],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **RESTART},
            timeout=LIMIT_SECONDS,
            check=True,
            capture_output=True,
        )
        weights, resumed_from = (Path(folder) / "weights").read_text().split()
        return weights, resumed_from


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=25)
    parser.add_argument("--control", type=int, default=10)
    parser.add_argument("--worlds", default="1,2,3,4")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    given = parser.parse_args()
    worlds = [int(size) for size in given.worlds.split(",")]
    rows = exact_resume(worlds, given.trials, given.control, given.device)
    sys.exit(finish(rows, given.json))


if __name__ == "__main__":
    main()
