"""`tandem check my_task.py`: validate a task with two short runs, probes of two ranks, and a killed run.

Each finding is one line with file and line number. A "wrong" finding breaks exact resume or the start; a note
does not.
"""

import json
import math
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tandem.config import Settings
from tandem.errors import FAILED, FINISHED, ConfigError, RunFailedError
from tandem.launch.simulated import stop_with_parent
from tandem.process import safe_path
from tandem.signals import StopFlag
from tandem.text import format_duration
from tandem.timeouts import CHECK_SAYS_SECONDS, CHECK_SECONDS
from tandem.verify.outcome import difference
from tandem.verify.probe import Fact, ProbeResults
from tandem.verify.resume import SEE, STATE, Runner

STEPS = 20
RANKS = 2
MISTAKEN = ConfigError.exit_code
LEVELS = ("ok", "note", "wrong")
_DRAWS = (
    "draw from the global generators of torch, random or numpy, not from entropy, time or your own generator"
)
_RANKS = "they must be equal on all ranks: tandem gives each rank its share (docs/bring-your-own-model.md)"
Say = Callable[[str], None]


class Finding(NamedTuple):
    """A result of the check.

    `level` is ok, note or wrong, or "2 of 4" when a part begins; `location`: "my_task.py line 12: ".
    """

    level: str
    text: str
    location: str = ""

    def __str__(self) -> str:
        return f"  {self.level:<6} {self.location}{self.text}"


class TaskParts:
    """The progress of `check`: a line when a part begins, with the remaining time from the second part on.

    The first part gives the estimate: all parts take about as long, and the last one, which starts twice,
    half as long again.
    """

    COUNT = 4
    LAST = 1.5

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._number = 0
        self._each = 0.0

    def next(self, what: str) -> Finding:
        self._number += 1
        if self._number == 2:
            self._each = self._clock() - self._began
        left = self._each * (self.COUNT - self._number + self.LAST)
        # The estimate has a precision of 10 s, and too long is better than too short.
        to_go = f"; about {format_duration(10 * math.ceil(left / 10))} to go" if self._number > 1 else ""
        return Finding(f"{self._number} of {self.COUNT}", f"{what}{to_go}")


def check(
    settings: Settings, arguments: Sequence[str], environ: Mapping[str, str], stop: StopFlag, say: Say
) -> tuple[int, list[Finding]]:
    """Check everything in a temporary directory; return (0 or 1 if something is wrong, the findings).

    `arguments` are the flags that `settings` came from. Raises StoppedError, and RunFailedError with code 2
    and the message if the task cannot start at all.
    """
    found: list[Finding] = []
    with with_progress_lines(say) as say_now:
        try:
            for finding in findings(settings, arguments, environ, stop):
                say_now(str(finding))
                found.append(finding)
        except RunFailedError as error:
            # A rejected setting or task is the user's mistake, not a finding about a task that runs.
            if error.exit_code == MISTAKEN:
                raise
            found.append(Finding("wrong", f"a run ended with exit code {error.exit_code}: {error}"))
            say_now(str(found[-1]))
    count = sum(each.level == "wrong" for each in found)
    say("verdict: sound" if not count else f"verdict: {'1 thing is' if count == 1 else f'{count} are'} wrong")
    return FAILED if count else FINISHED, [each for each in found if each.level in LEVELS]


def as_json(settings: Settings, found: Sequence[Finding]) -> dict[str, object]:
    """Return what `tandem check --json` prints."""
    findings = [
        {"level": f.level, "place": f.location.removesuffix(": ") or None, "text": f.text} for f in found
    ]
    is_sound = all(each.level != "wrong" for each in found)
    return {"task": settings.run.task, "sound": is_sound, "findings": findings}


@contextmanager
def with_progress_lines(say: Say) -> Iterator[Say]:
    """Yield a function like `say`, and print a line when it was not called for CHECK_SAYS_SECONDS."""
    closing, lock = threading.Event(), threading.Lock()
    began = last = time.monotonic()

    def say_now(text: str) -> None:
        nonlocal last
        # The thread below prints as well, and both change `last`.
        with lock:
            last = time.monotonic()
            say(text)

    def watch() -> None:
        while not closing.wait(max(0.0, last + CHECK_SAYS_SECONDS - time.monotonic())):
            # A line may have been printed during the wait.
            if time.monotonic() - last >= CHECK_SAYS_SECONDS:
                say_now(
                    str(Finding("...", f"still running after {format_duration(time.monotonic() - began)}"))
                )

    thread = threading.Thread(target=watch, name="tandem-check", daemon=True)
    thread.start()
    try:
        yield say_now
    finally:
        closing.set()
        thread.join()


def findings(
    settings: Settings, arguments: Sequence[str], environ: Mapping[str, str], stop: StopFlag
) -> Iterator[Finding]:
    """Yield each finding at once, and a line when each part begins."""
    parts = TaskParts(time.monotonic)
    with tempfile.TemporaryDirectory(prefix="tandem-check-") as name:
        folder = Path(name)
        steps = min(settings.run.steps or STEPS, STEPS)
        # GPU kernels may add in any order, which would hide differences that the task itself causes.
        runner = Runner([*arguments, f"--nproc={RANKS}", "--device=cpu"], environ, folder, steps, stop)
        yield parts.next(f"a run of {steps} steps on {RANKS} ranks")
        baseline = runner.uninterrupted()
        yield Finding("ok", f"trains, evaluates and saves: {baseline.step} steps")
        yield parts.next("samples, first weights and gradients, twice on each rank")
        ranks = facts_of_ranks(settings, environ, folder)
        yield from compared(ranks)
        task = ranks[0].task
        wrong = any(f.level == "wrong" for f in compared(ranks))
        yield parts.next("the same run again")
        if again := difference(baseline, runner.uninterrupted()):
            # The probes have reported the method that differs, and this is its consequence.
            if not wrong:
                yield Finding("wrong", f"two uninterrupted runs differ: {again}; {SEE['task']}", task)
            return  # killed runs would differ as well
        yield Finding("ok", "two uninterrupted runs are bit-identical")
        yield parts.next("a run that is killed and resumed")
        # There is no seed: a repeated check kills at another step.
        trial = next(runner.trials(baseline, 1, random.Random()))
        if trial.difference is None:
            yield Finding("ok", str(trial))
        else:
            reason = f"something it depends on is neither {STATE['task']} nor determined by the step"
            why = f"{reason}; {SEE['task']}"
            yield Finding("wrong", f"{trial}; {why}", task)


def compared(ranks: Sequence[ProbeResults]) -> Iterator[Finding]:
    """Yield the differences between two calls, and between ranks."""
    sound = True
    for of_ranks in zip(*(rank.facts for rank in ranks), strict=True):
        fact = of_ranks[0]
        here = [each.first for each in of_ranks]
        if fact.first != fact.second:
            text = f"{fact.name}: two calls in a row differ with the same seeds; {_DRAWS}"
        elif len(set(here)) > 1:
            text = f"{fact.name}: different on each rank ({', '.join(here)}); {_RANKS}"
        else:
            continue
        sound = False
        yield Finding("wrong", text, fact.location)
        break  # everything that depends on it differs too
    if sound:
        names = ", ".join(fact.name for fact in ranks[0].facts)
        yield Finding("ok", f"the same at every call and on every rank: {names}")
    for location, text in ranks[0].unpicklable:
        yield Finding("note", f"{text}; tandem's loaders do not need that, others may", location)


def facts_of_ranks(settings: Settings, environ: Mapping[str, str], folder: Path) -> list[ProbeResults]:
    """Return the facts of `RANKS` interpreters. Raises RunFailedError with the last line of a failed one."""
    given = folder / "settings.json"
    given.write_text(json.dumps(settings.to_dict()))
    command = [sys.executable, "-m", "tandem.verify.probe", str(given)]
    # Gloo would otherwise look up the host's name, which may not resolve. No run uses a GPU.
    environment = safe_path({**environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""})
    # Use files: a rank that fills its pipe while another's is being read would block, and so would the other.
    outputs = [folder / f"rank-{rank}.out" for rank in range(RANKS)]
    with ExitStack() as opened:
        started = [
            subprocess.Popen(
                [*command, str(rank), str(RANKS), f"file://{folder}/meet"],
                stdin=subprocess.DEVNULL,
                stdout=opened.enter_context(output.open("w")),
                stderr=opened.enter_context(output.with_suffix(".err").open("w")),
                env=environment,
                preexec_fn=stop_with_parent,
            )
            for rank, output in enumerate(outputs)
        ]
    return [_facts(process, output) for process, output in zip(started, outputs, strict=True)]


def _facts(process: "subprocess.Popen[bytes]", written: Path) -> ProbeResults:
    try:
        process.wait(CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise RunFailedError(
            f"a rank did not build its data and model within {CHECK_SECONDS:g} s", FAILED
        ) from None
    output, errors = (path.read_text(errors="replace") for path in (written, written.with_suffix(".err")))
    if process.returncode != FINISHED:
        raise RunFailedError((errors.strip() or f"code {process.returncode}").splitlines()[-1], FAILED)
    # Read only the last line: the task may print its own lines before it.
    facts, unpicklable, task = json.loads(output.splitlines()[-1])
    return ProbeResults(
        [Fact(*each) for each in facts], [(location, text) for location, text in unpicklable], task
    )
