"""`tandem verify-resume`: prove that a killed and resumed run of a task or script is bit-identical.

It runs a few steps without interruption. Then it repeats them several times, with SIGKILL at random steps and
a resume to the end. It compares the weights, the rest of the state and the log of every step. All runs are
real processes, controlled from outside, so the result shows what `tandem launch` does with these settings.
"""

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.config import Settings
from tandem.errors import FAILED, FINISHED, ConfigError, RunFailedError
from tandem.launch.this_machine import gpus_of
from tandem.log import pluralize
from tandem.script.job import Program
from tandem.signals import StopFlag
from tandem.verify.outcome import Outcome, difference
from tandem.verify.watched_run import Kill, NothingResumedError, WatchedRun

STEPS = 40
TRIES = 3
STATE = {"task": "in the state of its model and optimizer", "script": "passed to run.keep"}
SEE = {
    "task": "see `Rules for exact resume` in docs/bring-your-own-model.md",
    "script": "see `Rules for exact resume` in docs/your-own-loop.md",
}

Say = Callable[[str], None]


@dataclass
class Trial:
    """One killed run: its kills, where it resumed, and how it differs (None: not at all)."""

    kills: list[tuple[int, int | None]] = field(default_factory=list)  # (step reached, rank or None)
    resumed_from: list[int] = field(default_factory=list)
    difference: str | None = None

    def __str__(self) -> str:
        done = " and ".join(
            f"{'every process' if rank is None else f'rank {rank}'} at step {step}"
            for step, rank in self.kills
        )
        resumed = " and ".join(map(str, self.resumed_from)) or "0"
        outcome = self.difference or "same weights, state and losses"
        return f"killed {done}, resumed from {resumed}: {outcome}"

    def as_json(self) -> dict[str, object]:
        """Return {"kills": [{"step", "rank"}], "resumed_from": [step], "difference"}.

        A rank of null means all ranks.
        """
        kills = [{"step": step, "rank": rank} for step, rank in self.kills]
        return {"kills": kills, "resumed_from": self.resumed_from, "difference": self.difference}


def verify(
    settings: Settings,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    trials: int,
    stop: StopFlag,
    say: Say,
    script: Program | None = None,
) -> tuple[int, dict[str, object]]:
    """Run the whole proof in a temporary directory; return (0 if all trials are exact, else 1; JSON output).

    `arguments` are the flags that `settings` came from; a `script` is run instead of their task. Raises
    StoppedError, and RunFailedError if the task or script cannot run at all.
    """
    steps = min(settings.run.steps or STEPS, STEPS)
    with tempfile.TemporaryDirectory(prefix="tandem-verify-") as folder:
        if on_gpus := settings.compute.device != "cpu" and bool(gpus_of(environ)):
            # GPU kernels may add in any order, so even two uninterrupted runs would differ.
            arguments = [*arguments, "--deterministic=true"]
        runner = Runner(arguments, environ, Path(folder), steps, stop, script)
        baseline = runner.uninterrupted()
        name = script or settings.run.task
        ranks = pluralize(baseline.world_size, "rank")
        killed = f"of {pluralize(trials, 'killed run')}"
        say(f"verify-resume: {name}, {baseline.step} steps on {ranks}, {pluralize(trials, 'trial')}")
        shown = ", ".join(f"{part} {value[:12]}" for part, value in baseline.digests().items())
        say(f"uninterrupted: {shown}{', on GPUs with --deterministic' if on_gpus else ''}")
        done: list[Trial] = []
        # There is no seed: a repeated proof kills at other steps.
        for trial in runner.trials(baseline, trials, random.Random()):
            done.append(trial)
            say(f"trial {len(done)} of {trials}: {trial}")
        bad = [trial for trial in done if trial.difference is not None]
        diagnosis = runner.diagnosis(baseline) if bad else None
        if bad:
            say(f"verdict: not exact; {len(bad)} {killed} {'differs' if len(bad) == 1 else 'differ'}")
            say(f"reason: {diagnosis}")
        else:
            are = "is" if trials == 1 else "are"
            say(f"verdict: exact; {trials} {killed} {are} bit-identical to the uninterrupted run")
        return FAILED if bad else FINISHED, as_json(str(name), baseline, done, diagnosis)


def as_json(
    name: str, baseline: Outcome, trials: Sequence[Trial], diagnosis: str | None
) -> dict[str, object]:
    """Return what `tandem verify-resume --json` prints."""
    return {
        "target": name,
        "steps": baseline.step,
        "ranks": baseline.world_size,
        "exact": all(trial.difference is None for trial in trials),
        "diagnosis": diagnosis,
        "digests": baseline.digests(),
        "trials": [trial.as_json() for trial in trials],
    }


@dataclass
class Runner:
    """Runs one task or script with the same settings, each time in a new directory below `folder`."""

    arguments: Sequence[str]
    environ: Mapping[str, str]
    folder: Path
    steps: int
    stop: StopFlag
    script: Program | None = None
    _count: int = 0
    _differs: Sequence[str] = ()

    def uninterrupted(self) -> Outcome:
        """Do an uninterrupted run.

        Raises RunFailedError with its last lines of output, and ConfigError for a script without a tandem
        loop.
        """
        # Save once, at the end: the number of saves must not change the result either.
        run = self._new_run(save_every=self.steps)
        with run:
            run.finish(self.stop)
        self._differs = run.kept_that_differs()
        if self.script is not None and not run.has_trained():
            raise ConfigError(
                f"{self.script} succeeded, but without a step in a loop over run.batches(...); "
                "verify-resume needs a script that calls tandem.start(), see docs/your-own-loop.md"
            )
        return run.outcome()

    def trials(self, baseline: Outcome, count: int, chance: random.Random) -> Iterator[Trial]:
        """Yield killed and compared runs: every second one is killed twice; targets and steps are random.

        Raises RunFailedError if the run always ends before the kill.
        """
        for number in range(count):
            yield self._trial(baseline, 1 + number % 2, chance)

    def _trial(self, baseline: Outcome, kills: int, chance: random.Random) -> Trial:
        for attempt in range(TRIES):
            save_every = chance.randint(1, max(1, self.steps // 8))
            latest = (baseline.step - 4) // (attempt + 1)  # a short run may end before the signal arrives
            # Kill after the first save, so that there is a checkpoint to resume from.
            step = chance.randint(min(save_every, latest), max(1, latest))
            targets = [chance.choice([None, chance.randrange(baseline.world_size)]) for _ in range(kills)]
            try:
                return self.trial(baseline, [Kill(step, target) for target in targets], save_every)
            except NothingResumedError:
                continue
        raise RunFailedError(
            f"the run of {baseline.step} steps ended {TRIES} times before it could be killed and resumed "
            "from a saved state; use a larger batch or a larger model",
            FAILED,
        )

    def trial(self, baseline: Outcome, kills: Sequence[Kill], save_every: int) -> Trial:
        """Do one run with the given kills, resume after each, and compare it with `baseline`.

        If the run is already beyond a kill's step, the kill comes right after the first step of the next
        generation. Raises NothingResumedError if the run ended before the last kill, or if its result is
        equal, but no state was loaded.
        """
        trial = Trial()
        run = self._new_run(save_every)
        with run:
            try:
                for kill in kills:
                    trial.kills.append((run.kill(kill, self.stop), kill.rank))
                run.finish(self.stop)
            # The baseline succeeded with these settings, so the resume is at fault.
            except RunFailedError as error:
                trial.difference = f"it could not resume: {error}"
        # Nothing was resumed, so an equal result would prove nothing.
        if run.had_finished(baseline.step):
            raise NothingResumedError
        trial.resumed_from = run.resumed_from()
        if trial.difference is None:
            trial.difference = difference(baseline, run.outcome())
        if trial.difference is None and not trial.resumed_from:
            raise NothingResumedError
        return trial

    def diagnosis(self, baseline: Outcome) -> str:
        """Find out, with a second uninterrupted run, whether resuming causes the difference."""
        what = "task" if self.script is None else "script"
        again = difference(baseline, self.uninterrupted())
        if again is not None:
            return (
                f"two uninterrupted runs already differ ({again}). This {what} is not deterministic: it uses "
                f"the time, entropy, or kernels that add in any order; {SEE[what]}"
            )
        if self._differs:
            names = ", ".join(self._differs)
            differ = "differs" if len(self._differs) == 1 else "differ"
            return (
                f"uninterrupted runs agree. {names}, passed to run.keep, {differ} between ranks, but a "
                f"checkpoint has rank 0's only. Pass each rank's own values in per_rank; {SEE[what]}"
            )
        return (
            f"uninterrupted runs agree. Something this {what} depends on is neither {STATE[what]} nor "
            f"determined by the step, such as its own random generator or a counter; {SEE[what]}"
        )

    def _new_run(self, save_every: int) -> WatchedRun:
        self._count += 1
        run_dir = self.folder / f"run-{self._count}"
        flags: dict[str, object] = {
            "--steps": self.steps,
            "--checkpoint-every": save_every,
            "--resume": "auto",
            # Log every step, because each step's loss is compared.
            "--log-every": 1,
            # The kills are the test, so the budget must never end the run.
            "--max-restarts": 100,
            "--metrics": 0,
        }
        program = self.script.words() if self.script is not None else []
        return WatchedRun(self.environ, run_dir, flags, self.arguments, program)
