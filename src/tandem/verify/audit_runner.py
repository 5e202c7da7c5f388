"""Start any program in a copy of its directory, kill it while it trains, and start it again.

The program does not need to use tandem. It is observed from outside, through its files, its output, and the
steps that `audit_observer` records.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from tandem.errors import FINISHED, ConfigError, StoppedError
from tandem.launch.simulated import stop_with_parent
from tandem.process import below, send, stat_of
from tandem.signals import StopFlag
from tandem.timeouts import AUDIT_POLL_SECONDS, RANK_KILLED_SECONDS, SHORTEST_RESTART_SECONDS
from tandem.verify import audit_observer
from tandem.verify.audit_files import has_tensors
from tandem.verify.watched_run import kill_tree

WORK = "{work}"
"""Placeholder, in the command or a variable, for the directory of one run's outputs."""
MOST_COPIED = 2**30
NOT_COPIED = (".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".ruff_cache")
SLOWER = 10
"""A restart that takes this many times as long as an uninterrupted run counts as hung."""
Popen = Callable[..., "subprocess.Popen[Any]"]


def launched(command: Sequence[str], launcher: str, nproc: int) -> list[str]:
    """Return the command line that starts `command` with a launcher. Raises ConfigError."""
    words = list(command)
    python = sys.executable
    if words[0].endswith(".py"):
        words.insert(0, python)
    if set(Path(words[0]).parts) & set(NOT_COPIED):
        # For example .venv/bin/python. Do not resolve it, because its link identifies the virtual
        # environment.
        words[0] = os.path.abspath(words[0])
    if Path(words[0]).name.startswith("python"):
        # Use the launcher of the environment in which the program runs.
        python = words[0]
    if launcher == "torchrun":
        # --standalone: a free port, because killed runs may keep theirs for a while.
        own = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", "--no-python"]
        return [python, *own, *words]
    if launcher == "accelerate":
        own = ["-m", "accelerate.commands.launch", f"--num_processes={nproc}", "--no_python"]
        return [python, *own, *words]
    if nproc != 1:
        raise ConfigError(f"--nproc {nproc} needs --launcher torchrun or accelerate")
    return words


@dataclass(frozen=True)
class Audited:
    """The program: its command, the directory it starts in, its environment, and where runs are kept.

    `popen` starts a process, as subprocess.Popen does.
    """

    command: Sequence[str]
    source: Path
    environ: Mapping[str, str]
    folder: Path
    popen: Popen = subprocess.Popen

    @property
    def has_placeholder(self) -> bool:
        """Return True if the program gets the directory for its outputs by {work}."""
        return any(WORK in word for word in (*self.command, *self.environ.values()))

    @property
    def work(self) -> Path:
        # All runs use the same path in turn, so that paths cannot make two runs differ.
        return self.folder / "work"

    def prepare(self) -> None:
        """Make the work directory. Raises ConfigError if the program's directory is too large to copy."""
        if self.has_placeholder:
            self.work.mkdir()
            return
        if (size := _size(self.source)) > MOST_COPIED:
            raise ConfigError(
                f"{self.source} has more than {size // 2**20:,} MiB, too much for a copy per run; write "
                f"{WORK} into the command where it has its output directory, for example --output {WORK}/out"
            )
        shutil.copytree(self.source, self.work, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))

    def start(self, output: Path, steps: Path) -> "subprocess.Popen[Any]":
        """Start the program once; its output goes to a file, and its steps to a directory.

        Raises ConfigError if the kernel cannot execute it.
        """
        hooks = self.folder / "hooks"
        if not hooks.exists():
            hooks.mkdir()
            shutil.copyfile(audit_observer.__file__, hooks / "sitecustomize.py")
        steps.mkdir()
        environ = {name: value.replace(WORK, str(self.work)) for name, value in self.environ.items()}
        paths = [str(hooks), *filter(None, [environ.get("PYTHONPATH")])]
        environ |= {"PYTHONPATH": os.pathsep.join(paths), audit_observer.FOLDER: str(steps)}
        words = [word.replace(WORK, str(self.work)) for word in self.command]
        try:
            with output.open("wb") as file:
                return self.popen(
                    words,
                    cwd=self.source if self.has_placeholder else self.work,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=stop_with_parent,
                )
        except OSError as error:
            raise ConfigError(
                f"cannot execute {words[0]}: {error.strerror}; expected a program, or a script whose "
                "first line names one that is installed"
            ) from error


def _size(folder: Path) -> int:
    """Return the bytes of a directory without NOT_COPIED; counts no further than MOST_COPIED."""
    total = 0
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in NOT_COPIED]
        for name in files:
            total += os.lstat(os.path.join(parent, name)).st_size
            if total > MOST_COPIED:
                return total
    return total


@dataclass
class AuditProgress:
    """The steps and seconds of an uninterrupted run at its first checkpoint, and in total."""

    steps_at_save: int = 0
    steps: int = 0
    seconds_at_save: float = 0.0
    seconds: float = 0.0
    saves_tensors: bool = False

    @property
    def saves_midway(self) -> bool:
        """Return True if there is something to do after the first checkpoint."""
        if self.steps:
            return self.steps_at_save < self.steps - 1
        return self.seconds_at_save < 0.9 * self.seconds


@dataclass
class AuditedRun:
    """One run: started, perhaps killed and started again. Leaving the block kills its remaining processes."""

    audited: Audited
    number: int
    codes: list[int] = field(default_factory=list)
    """Exit codes of the starts that ended by themselves."""
    killed_at: list[int] = field(default_factory=list)
    """The steps that had begun at each kill, in that start."""
    hung: bool = False

    def __enter__(self) -> "AuditedRun":
        self.audited.prepare()
        self._before = _files(self.audited.work)
        self._process: subprocess.Popen[Any] | None = None
        self._starts = 0
        return self

    def __exit__(self, *_error: object) -> None:
        self._kill_all()
        # The next run needs the work directory.
        self.audited.work.rename(self.folder)

    @property
    def folder(self) -> Path:
        """The directory of the outputs, after the block."""
        return self.audited.folder / f"run-{self.number}"

    def outputs(self) -> list[Path]:
        return [self.audited.folder / f"run-{self.number}-{start}.out" for start in range(self._starts)]

    def steps(self) -> list[Path]:
        return [self.audited.folder / f"run-{self.number}-{start}.steps" for start in range(self._starts)]

    def changed(self) -> list[PurePath]:
        """Return the files that the run has written, relative to its directory."""
        folder = self.audited.work if self.audited.work.exists() else self.folder
        now = _files(folder)
        return [path for path, seen in now.items() if self._before.get(path) != seen]

    def finish(self, stop: StopFlag) -> AuditProgress:
        """Run to the end, and return when the first checkpoint was written. Raises StoppedError."""
        self._start()
        began = time.monotonic()
        seen: dict[bool, tuple[int, float]] = {}
        while not self._has_ended(stop):
            looked = time.monotonic()
            for tensors in (False, True):
                if tensors not in seen and self._has_saved(tensors):
                    seen[tensors] = self._steps_begun(), time.monotonic() - began
            # A large directory takes longer to read, and the program also needs the processor.
            time.sleep(max(AUDIT_POLL_SECONDS, 5 * (time.monotonic() - looked)))
        steps, seconds = seen.get(True) or seen.get(False) or (0, 0.0)
        return AuditProgress(steps, self._steps_begun(), seconds, time.monotonic() - began, True in seen)

    def kill(self, progress: AuditProgress, share: float, stop: StopFlag, one: random.Random | None) -> bool:
        """Kill this start at a share (0 to 1) of its steps after the first checkpoint; False: it ended first.

        With `one`, only one process is killed, chosen at random with it: a rank if there are several.
        """
        self._start()
        began = time.monotonic()
        # A program that saves only at the end is killed anywhere.
        is_saved = bool(self.killed_at) or not progress.saves_midway
        first = 1 if is_saved else progress.steps_at_save + 1
        last = max(first, progress.steps - 2 - sum(self.killed_at))
        due = first + int(share * (last - first + 1))
        start = 0.0 if is_saved else progress.seconds_at_save
        seconds = start + share * (progress.seconds - start)
        limit = self._limit(progress)
        while not self._has_ended(stop):
            is_saved = is_saved or self._has_saved(progress.saves_tensors)
            is_due = self._steps_begun() >= due if progress.steps else time.monotonic() - began >= seconds
            if is_saved and is_due:
                if one is not None:
                    self._kill_one(one, stop)
                self._kill_all()
                # Count now, because more steps may have begun before the signal arrived.
                self.killed_at.append(self._steps_begun())
                return True
            if time.monotonic() > limit:
                self._give_up()
                return False
            time.sleep(AUDIT_POLL_SECONDS)
        return False

    def resume(self, progress: AuditProgress, stop: StopFlag) -> None:
        """Start the program again and let it end; `hung` is set if it takes far too long."""
        self._start()
        limit = self._limit(progress)
        while not self._has_ended(stop):
            if time.monotonic() > limit:
                return self._give_up()
            time.sleep(AUDIT_POLL_SECONDS)

    def _limit(self, progress: AuditProgress) -> float:
        return time.monotonic() + max(SHORTEST_RESTART_SECONDS, SLOWER * progress.seconds)

    def _give_up(self) -> None:
        self.hung = True
        self._kill_all()

    def last_line(self) -> str:
        """Return the last line that the latest start has printed."""
        lines = self.outputs()[-1].read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")

    def _start(self) -> None:
        name = f"run-{self.number}-{self._starts}"
        self._process = self.audited.start(
            self.audited.folder / f"{name}.out", self.audited.folder / f"{name}.steps"
        )
        self._starts += 1

    def _has_ended(self, stop: StopFlag) -> bool:
        if stop:
            raise StoppedError(f"stopped by {stop.name}; no result")
        if self._process is None or self._process.poll() is None:
            return self._process is None
        code = self._process.returncode
        # DataLoader workers may outlive a program that has failed.
        self._kill_all()
        self.codes.append(code if code >= 0 else 128 - code)
        return True

    def _has_saved(self, tensors: bool = False) -> bool:
        """Return whether a file was written; with `tensors`, one that may contain a checkpoint."""
        changed = self.changed()
        if tensors:
            return any(has_tensors(path) for path in changed)
        return bool(changed) or self.outputs()[-1].stat().st_size > 0

    def _steps_begun(self) -> int:
        """Return the number of steps that the rank with most of them has recorded in this start."""
        files = self.steps()[-1].glob("*-*")
        return max((path.read_bytes().count(b"\n") for path in files), default=0)

    def _kill_one(self, chance: random.Random, stop: StopFlag) -> None:
        assert self._process is not None
        everything = below(self._process.pid)
        ranks = [each.pid for each in everything if _is_rank(each.pid)]
        # A rank's own helpers inherit its variables; parents come first.
        victims = ranks or [self._process.pid]
        send(signal.SIGKILL, [chance.choice(victims)])
        deadline = time.monotonic() + RANK_KILLED_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            if stop:
                raise StoppedError(f"stopped by {stop.name}; no result")
            time.sleep(AUDIT_POLL_SECONDS)

    def _kill_all(self) -> None:
        if self._process is not None:
            kill_tree(self._process)
            self._process = None


def _is_rank(pid: int) -> bool:
    """Return whether a launcher started this process as a rank: RANK is set here, but not in its parent."""
    try:
        parent = int(stat_of(pid)[1])
        has = [b"\0RANK=" in b"\0" + Path(f"/proc/{each}/environ").read_bytes() for each in (pid, parent)]
    except (OSError, ValueError, IndexError):
        return False
    return has == [True, False]


def _files(folder: Path) -> dict[PurePath, tuple[int, int]]:
    """Return {path relative to `folder`: (time of the last change, bytes)} of all its files."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            try:
                status = path.lstat()
            except OSError:  # it was renamed meanwhile
                continue
            found[PurePath(path.relative_to(folder))] = status.st_mtime_ns, status.st_size
    return found


def succeeded(run: AuditedRun) -> bool:
    """Return whether the last start ended by itself with exit code 0."""
    return not run.hung and run.codes[-1:] == [FINISHED]
