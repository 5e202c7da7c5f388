"""`tandem verify-resume -- COMMAND`: audit whether any training program resumes correctly.

The program does not need to use tandem. The audit first runs the command twice without interruption, which
shows which values the program itself does not reproduce. Then it runs the command several more times, kills
it with SIGKILL at random moments after its first checkpoint, and restarts it until it finishes. It compares
the tensors and logged numbers of these runs, and reports the likely cause of a difference.
"""

import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePath

from tandem.errors import FAILED, FINISHED, RunFailedError
from tandem.log import pluralize
from tandem.signals import StopFlag
from tandem.verify import audit_logs
from tandem.verify.audit_compare import TOO_NOISY, Reference, RunOutputs, damaged
from tandem.verify.audit_findings import (
    KINDS,
    Alignment,
    AuditFinding,
    Baseline,
    Step,
    align,
    distinct,
    from_logs,
    from_names,
    read_steps,
)
from tandem.verify.audit_runner import Audited, AuditedRun, AuditProgress, launched, succeeded
from tandem.work.base import run_failed

KILLS = 3
TRIES = 3
EXACT = "exact"
NOISE = "equal within the program's own noise"
DIFFERS = "differs"
UNJUDGED = "could not be judged"
Say = Callable[[str], None]


@dataclass(frozen=True)
class AuditOptions:
    """The command to audit, how to start it, and which of its outputs to compare.

    `outputs` are patterns of files below its directory; without any, all files. `log` is a regular expression
    with named groups, for its output and its .log and .txt files. `kill_rank`: kill one process of a job, not
    all.
    """

    command: Sequence[str]
    launcher: str = "none"
    nproc: int = 1
    kills: int = KILLS
    outputs: Sequence[str] = ()
    log: re.Pattern[str] | None = None
    kill_rank: bool = False


@dataclass
class AuditTrial:
    """One killed run: the steps begun at each kill, the steps it resumed at, and how it differs."""

    killed_at: list[int]
    resumed_at: list[int | None]
    difference: str | None
    first_step: float | None = None
    findings: list[AuditFinding] = field(default_factory=list)
    is_noisy: bool = False
    lost: int = 0
    """Number of logged values that the kill lost."""

    def __str__(self) -> str:
        killed = " and ".join(f"step {step}" if step else "an unknown step" for step in self.killed_at)
        resumed = " and ".join(
            "an unknown step" if step is None else f"step {step}" for step in self.resumed_at
        )
        equal = "equal within noise" if self.is_noisy else "same tensors and numbers"
        if self.lost:
            equal += f", without {pluralize(self.lost, 'logged number')} from before the kill"
        return f"killed in {killed}, resumed at {resumed or 'an unknown step'}: {self.difference or equal}"

    def as_json(self) -> dict[str, object]:
        """Return {"killed_at", "resumed_at", "difference", "first_step", "kinds"}."""
        return {
            "killed_at": self.killed_at,
            "resumed_at": self.resumed_at,
            "difference": self.difference,
            "first_step": self.first_step,
            "kinds": [finding.kind for finding in self.findings],
        }


@dataclass
class AuditVerdict:
    """The result: one of four verdicts, why, the trials, and each kind of bug that was found."""

    verdict: str
    why: str | None
    trials: list[AuditTrial]
    kinds: list[tuple[AuditFinding, int]] = field(default_factory=list)
    """The first finding of each kind, and the number of trials that have it."""

    @property
    def exit_code(self) -> int:
        return FINISHED if self.verdict in (EXACT, NOISE) else FAILED

    def lines(self) -> list[str]:
        found = [f"verdict: {self.verdict}{'; ' if self.why else ''}{self.why or ''}"]
        for finding, count in self.kinds:
            where = f" (rank {finding.rank})" if finding.rank else ""
            kind = KINDS[finding.kind]
            found.append(f"reason: {kind.title}{where}, in {count} of {len(self.trials)} killed runs")
            found.append(f"  evidence: {finding.evidence}")
            found.append(f"  what to do: {kind.fix}")
        return found

    def as_json(self, asked: AuditOptions) -> dict[str, object]:
        """Return what `tandem verify-resume --json -- COMMAND` prints."""
        kinds = [
            {
                "kind": finding.kind,
                "title": KINDS[finding.kind].title,
                "evidence": finding.evidence,
                "fix": KINDS[finding.kind].fix,
                "step": finding.step,
                "rank": finding.rank,
                "trials": count,
            }
            for finding, count in self.kinds
        ]
        return {
            "target": " ".join(asked.command),
            "launcher": asked.launcher,
            "verdict": self.verdict,
            "why": self.why,
            "exact": self.verdict == EXACT,
            "kinds": kinds,
            "trials": [trial.as_json() for trial in self.trials],
        }


def audit(asked: AuditOptions, environ: Mapping[str, str], stop: StopFlag, say: Say) -> AuditVerdict:
    """Audit a program in a temporary directory; `say` gets each line of the report.

    Raises StoppedError, ConfigError, and RunFailedError if the program fails without a kill.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-audit-") as folder:
        command = launched(asked.command, asked.launcher, asked.nproc)
        audited = Audited(command, Path.cwd(), environ, Path(folder))
        found = Audit(asked, audited, stop, say).run(random.Random())
        for line in found.lines():
            say(line)
        return found


@dataclass
class Audit:
    """The runs of one audit, and their outputs."""

    asked: AuditOptions
    audited: Audited
    stop: StopFlag
    say: Say
    _runs: int = 0

    def run(self, chance: random.Random) -> AuditVerdict:
        what = pluralize(self.asked.kills, "killed run")
        self.say(f"verify-resume: {' '.join(self.asked.command)}, 2 uninterrupted runs, {what}")
        one, progress = self._uninterrupted()
        other, _ = self._uninterrupted()
        left = self._leftovers(one)
        reference = Reference(left, self._leftovers(other))
        again = _steps(other)
        self._baselines = {
            rank: Baseline(steps, again[rank]) for rank, steps in _steps(one).items() if rank in again
        }
        self.say(f"uninterrupted: {self._described(reference, left, progress)}")
        if not reference.count and not left.logs:
            return AuditVerdict(UNJUDGED, self._nothing_to_compare(), [])
        trials = []
        for number in range(self.asked.kills):
            trial = self._trial(reference, left, progress, chance, kills=1 + number % 2)
            trials.append(trial)
            self.say(f"trial {number + 1} of {self.asked.kills}: {trial}")
        return judged(trials, reference)

    def _described(self, reference: Reference, left: RunOutputs, progress: AuditProgress) -> str:
        logged = sum(map(len, left.logs.values()))
        steps = f"{progress.steps} steps, " if progress.steps else "no optimizer step seen, "
        away, name = reference.largest
        same = (
            "two runs are equal" if reference.is_exact else f"two runs differ, most in `{name}` by {away:.2g}"
        )
        if not reference.is_exact and not name:
            same = "two runs differ in times only"
        return f"{steps}{reference.count} values in files, {logged} logged numbers; {same}"

    def _nothing_to_compare(self) -> str:
        where = "in the directory for {work}" if self.audited.has_placeholder else "in its directory"
        return (
            f"the program leaves no tensors and no numbers {where}; write {{work}} into the command where it "
            "has its output directory, or give --log with a pattern for its output"
        )

    def _uninterrupted(self) -> tuple[AuditedRun, AuditProgress]:
        self._runs += 1
        with AuditedRun(self.audited, self._runs) as run:
            progress = run.finish(self.stop)
        if not succeeded(run):
            # Users know the program's files by their names in the copied directory.
            text = run.outputs()[-1].read_text(errors="replace").replace(f"{self.audited.work}/", "")
            lines = text.splitlines()
            raise run_failed(run.codes[-1], lines)
        return run, progress

    def _trial(
        self,
        reference: Reference,
        left: RunOutputs,
        progress: AuditProgress,
        chance: random.Random,
        kills: int,
    ) -> AuditTrial:
        """Do one killed run and compare it. Raises RunFailedError if the program always ends first."""
        one = chance if self.asked.kill_rank else None
        for attempt in range(TRIES):
            self._runs += 1
            before: dict[str, dict[float, float]] = {}
            with AuditedRun(self.audited, self._runs) as run:
                for _ in range(kills):
                    # The first share of steps leaves time until a short program ends.
                    if not run.kill(progress, chance.uniform(0, 0.9) / (attempt + 1), self.stop, one):
                        break
                    _overlay(before, self._logs(run, self.audited.work))
                else:
                    run.resume(progress, self.stop)
                torn = [] if succeeded(run) else damaged(self.audited.work, run.changed())
            if run.killed_at:
                return self._judged(run, reference, left, before, torn)
        raise RunFailedError(
            f"the program ended {TRIES} times before it could be killed; let it train longer", FAILED
        )

    def _judged(
        self,
        run: AuditedRun,
        reference: Reference,
        left: RunOutputs,
        before: dict[str, dict[float, float]],
        torn: Sequence[str],
    ) -> AuditTrial:
        """Compare a killed run; `before` has the content of its logs at the last kill."""
        aligned = self._aligned(run)
        # Each start counts its own steps from 1.
        begun = [0, *((step or 1) - 1 for step in aligned.resumed_at)]
        killed_at = [step + at for step, at in zip(run.killed_at, begun, strict=False)]
        trial = AuditTrial(killed_at, aligned.resumed_at, None)
        if not succeeded(run):
            text = "it did not end" if run.hung else f"exit code {run.codes[-1]}"
            line = run.last_line()
            trial.difference = f"it could not resume: {text}, {line}"
            kind = "hangs" if run.hung else "torn" if torn else "cannot-resume"
            evidence = f"{', '.join(torn)} cannot be read; {line}" if torn else f"{text}: {line}"
            trial.findings = [AuditFinding(kind, evidence)]
            return trial
        killed = self._leftovers(run, before)
        difference = reference.compare(killed)
        trial.is_noisy = difference.within_noise > 0
        trial.first_step = difference.first_step
        trial.lost = difference.lost
        # The steps that were done do not depend on noise.
        certain = [each for each in aligned.findings if each.kind in ("skipped", "repeated", "fewer-steps")]
        if difference:
            trial.difference = str(difference)
            by_name = from_names(difference.tensors, difference.equal)
            trial.findings = distinct(aligned.findings) or by_name or from_logs(left.logs, killed.logs)
        elif trial.is_noisy and certain:
            trial.difference = "other steps than in the uninterrupted runs"
            trial.findings = distinct(certain)
        return trial

    def _aligned(self, run: AuditedRun) -> Alignment:
        """Align each rank; the findings of rank 0 come first."""
        starts = [read_steps(folder) for folder in run.steps()]
        found = Alignment()
        for rank, baseline in sorted(self._baselines.items()):
            processes = [steps for start in starts for steps in start.get(rank, [])]
            aligned = align(baseline, processes, succeeded(run), rank)
            found.resumed_at = found.resumed_at or aligned.resumed_at
            found.findings += aligned.findings
        return found

    def _leftovers(
        self, run: AuditedRun, before: Mapping[str, dict[float, float]] | None = None
    ) -> RunOutputs:
        series: dict[str, dict[float, float]] = {name: dict(each) for name, each in (before or {}).items()}
        _overlay(series, self._logs(run, run.folder))
        return RunOutputs(run.folder, self._compared(run), series)

    def _compared(self, run: AuditedRun) -> list[PurePath]:
        patterns = self.asked.outputs
        return [
            path for path in run.changed() if not patterns or any(fnmatch(str(path), p) for p in patterns)
        ]

    def _logs(self, run: AuditedRun, folder: Path) -> dict[str, dict[float, float]]:
        logs = audit_logs.read_logs(folder, self._compared(run), self.asked.log)
        pattern = self.asked.log
        for path in run.outputs():
            raw = path.read_bytes()
            rows = audit_logs.json_lines(raw) if pattern is None else audit_logs.lines_like(raw, pattern)
            if rows:
                logs.setdefault("output", []).extend(rows)
        return {
            f"{log}: {name}": values
            for log, rows in logs.items()
            for name, values in audit_logs.by_step(row for row in rows if row.step is not None).items()
        }


def judged(trials: Sequence[AuditTrial], reference: Reference) -> AuditVerdict:
    """Return the verdict about all killed runs."""
    counts: Counter[str] = Counter()
    first: dict[str, AuditFinding] = {}
    for trial in trials:
        for finding in trial.findings:
            counts[finding.kind] += 1
            first.setdefault(finding.kind, finding)
    kinds = [(each, counts[each.kind]) for each in distinct(first.values())]
    bad = sum(trial.difference is not None for trial in trials)
    away, name = reference.largest
    of = f"of {len(trials)} killed runs"
    if away > TOO_NOISY and not kinds:
        why = f"two uninterrupted runs already differ in `{name}` by {away:.0%}; set its seeds"
        return AuditVerdict(UNJUDGED, why, list(trials))
    if bad:
        why = f"{bad} {of} {'differs' if bad == 1 else 'differ'} from the uninterrupted runs"
        return AuditVerdict(DIFFERS, why, list(trials), kinds)
    resumed = [step for trial in trials for step in trial.resumed_at]
    if resumed and all(step == 1 for step in resumed):
        return AuditVerdict(UNJUDGED, "each restart began at step 1, so nothing was resumed", list(trials))
    if any(trial.is_noisy for trial in trials):
        why = f"{len(trials)} {of} are as close to the uninterrupted runs as those are to each other"
        return AuditVerdict(NOISE, why, list(trials))
    return AuditVerdict(EXACT, f"{len(trials)} {of} leave the same tensors and numbers", list(trials))


def _steps(run: AuditedRun) -> dict[int, list[Step]]:
    """Return {rank: steps} of an uninterrupted run."""
    processes = read_steps(run.steps()[-1])
    return {rank: [step for steps in each for step in steps] for rank, each in processes.items()}


def _overlay(series: dict[str, dict[float, float]], newer: Mapping[str, Mapping[float, float]]) -> None:
    for name, values in newer.items():
        series.setdefault(name, {}).update(values)
