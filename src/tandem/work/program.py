"""Run a user's program: the workload of `tandem launch train.py`, `-m module` and `-- command`.

tandem does not control its ranks, so this module attributes failures and finds one cause. See
docs/architecture.md#user-scripts.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from tandem import running_clock
from tandem.checkpoint.decision import ResumeDecision
from tandem.code_files import CodeFile
from tandem.config import SETTINGS, Settings
from tandem.config.fields import plain
from tandem.distributed.position import RankStart
from tandem.errors import (
    FAILED,
    FINISHED,
    KILLED,
    MISCONFIGURED,
    PEER_LOST,
    STOPPED,
    ConfigError,
    is_own,
    is_retried,
    job_code,
    was_killed,
)
from tandem.platforms.detection import Placement
from tandem.rotation import tail
from tandem.run.directory import RunDir
from tandem.script.job import Job, Program, error_file
from tandem.text import relative_path
from tandem.timeouts import MONITOR_SECONDS, OTHERS_SECONDS
from tandem.work.base import (
    TRAINED,
    Cause,
    GenerationEnd,
    RankFunction,
    WarmUp,
    choose_cause,
    failures,
    is_tandem_error,
    last_words,
    rank_identity,
)

log = logging.getLogger("tandem.launch")


def run_rank(job: Job, start: RankStart) -> NoReturn:
    """Run as the rank of a program that `start` describes, in a separate process."""
    from tandem.script import rank

    rank.run_rank(job, start)


def warm_up(job: Job, expected: RankStart | None) -> None:
    """Prepare a process that may become a rank."""
    from tandem.script import rank

    rank.warm_up(job, expected)


class ProgramWorkload:
    """A program's ranks save, stop and report errors in their own way, so tandem explains their exit codes.

    `chosen` as for `variables_of`. `hint` maps the last line of a program that rejected its arguments to the
    command to type instead, or to "".
    """

    saves = False
    has_own_store = True
    logs_errors = False
    charges_all = True
    standby_key: Callable[..., object] = staticmethod(rank_identity)

    def __init__(
        self,
        program: Program,
        run: RunDir,
        settings: Settings,
        chosen: Collection[str],
        hint: Callable[[str], str] = lambda said: "",
    ) -> None:
        self._program = program
        self._hint = hint
        self._name = settings.run.task
        self._run = run
        self._launch = settings.launch
        self.rank_entry: RankFunction = run_rank
        self.warm_up: WarmUp = warm_up
        path = os.path.abspath(program.target)
        self._code = {"__main__": CodeFile.of(path)} if program.kind == "script" else {}
        self.job = job_of(program, run, settings, chosen)
        self.words: Sequence[str] = program.words()
        # For a new interpreter, the fork server imports only the code that starts it, because exec drops the
        # modules.
        is_fresh = self.job.fresh_interpreter or program.kind == "command"
        self.preload: Sequence[str] = [*([] if is_fresh else ["tandem.launch.preload"]), "tandem.script.rank"]

    def check(self, placement: Placement, gpus: Callable[[], Sequence[str]]) -> None:
        """Raise ConfigError if the platform already started the ranks: each would launch the program."""
        if placement.rank is not None:
            raise ConfigError(
                f"{placement.platform} already starts each rank; `tandem launch {self._program}` would start "
                "them again; start one task per node, or run the program without tandem"
            )

    def prepare(self, placement: Placement) -> ResumeDecision | None:
        if placement.node_rank == 0 and self._launch.warm_gpu:
            log.warning("--warm-gpu has no effect on a script: scripts open their GPU themselves")
        return None

    def standby_code(self) -> object:
        """Return None: standby processes import only installed modules."""
        return None

    def code(self) -> Mapping[str, CodeFile]:
        """Return the script's own file; what it imports, only its ranks know."""
        return self._code

    def progress(self, has_trained: bool, resume: ResumeDecision) -> str:
        """Return TRAINED: a script may be stopped at any time, and decides what to save."""
        return TRAINED

    def is_done(self) -> bool:
        """Accept any job result of 0. The agent rejects it if a rank here has failed (`run_generations`)."""
        return True

    def is_retried(self, code: int) -> bool:
        return is_retried(code) or (self._launch.restart_on_error and is_own(code))

    def explain(self, end: GenerationEnd) -> tuple[int, Cause | None]:
        first = failures(end.codes)
        # No rank failed here: the code is 0 or 143.
        if not first:
            return _asked_to_stop(
                end, job_code([code for code in end.codes.values() if code is not None])
            ), None
        local_rank, code = choose_cause(first, end.blamed())
        if end.stop and code == PEER_LOST and STOPPED in end.now().values():
            return STOPPED, None  # it lost the rank that handled the signal first
        position = end.positions[local_rank]
        words = last_words(error_file(end.grant, position.rank), self._run.rank_log(position.rank))
        # A rank that could not save before it stopped exits with 137, but has not been killed.
        if was_killed(code) and not (words and is_tandem_error(words[-1])):
            # The last output of a killed rank does not explain the kill.
            words = ()
        cause = Cause(position.rank, position.node_rank, position.node_name, code, words)
        if end.nodes > 1 and not end.stop:
            # Without the store, this node's own cause is the best known one.
            with contextlib.suppress(RuntimeError):
                end.store.set(_ended_key(end, position.node_rank), cause.to_json())
                # A rank that was killed here is the cause. A failed one may only be a consequence of a kill
                # elsewhere.
                cause = cause if was_killed(code) else _explained_elsewhere(end, cause)
                code = cause.code
        if code == PEER_LOST and FINISHED in end.now().values():
            return FAILED, replace(cause, code=FAILED)  # no rank was lost: some ranks returned too early
        return code, cause

    def last_line(self, code: int, restarts: int) -> str:
        # argparse exits with 2 when it rejects arguments, and writes the reason last.
        if code == MISCONFIGURED:
            with contextlib.suppress(OSError):
                lines = tail(self._run.rank_log(0), 4000)[0].decode(errors="replace").splitlines()
                if lines and (hint := self._hint(lines[-1])):
                    return f"tandem: {hint}"
        if code not in (FINISHED, STOPPED):
            return ""
        run = relative_path(self._run.where)
        return f"{self._name} ended with code {code}; restarts: {restarts}; run directory: {run}"


def _asked_to_stop(end: GenerationEnd, code: int) -> int:
    """Return 143 for a requested stop, and 137 if the ranks stopped without a request to this agent.

    Some frameworks, such as Lightning, exit with 0 when they are asked to stop. 0 would tell the platform
    that the job is done.
    """
    if code == FINISHED and end.is_forwarded:
        return STOPPED
    # The signal may reach the ranks before their agent.
    deadline = running_clock.now() + OTHERS_SECONDS
    while code == STOPPED and not end.stop:
        if running_clock.now() > deadline:
            return KILLED
        time.sleep(MONITOR_SECONDS)
    return code


def _explained_elsewhere(end: GenerationEnd, ours: Cause) -> Cause:
    """Return the cause that other nodes have published, if it explains ours.

    A killed rank explains most, then a failed one.
    """
    position = end.positions[0]
    found = ours
    keys = [_ended_key(end, node) for node in range(position.nodes) if node != position.node_rank]
    deadline = running_clock.now() + OTHERS_SECONDS
    while running_clock.now() < deadline:
        for key in [key for key in keys if end.store.check([key])]:
            theirs = _cause_at(key, end)
            if theirs is not None and was_killed(theirs.code):
                return theirs
            if theirs is not None and theirs.code != PEER_LOST and found.code == PEER_LOST:
                found = theirs
        time.sleep(MONITOR_SECONDS)
    return found


def _cause_at(key: str, end: GenerationEnd) -> Cause | None:
    try:
        return Cause.from_json(end.store.get(key))
    except ValueError:  # any client of the store can write there
        return None


def _ended_key(end: GenerationEnd, node: int) -> str:
    return f"{end.prefix}/ended/{node}"


def job_of(program: Program, run: RunDir, settings: Settings, chosen: Collection[str]) -> Job:
    """Return the job of this node's ranks for the program; `chosen`: see `variables_of`."""
    hang = settings.reliability.hang_timeout
    return Job(
        program=program,
        logs=str(run.logs),
        variables=variables_of(settings, chosen),
        max_restarts=settings.launch.max_restarts,
        hang_timeout=None if hang == "auto" else float(hang),
        patience=settings.reliability.phase_timeout,
        json_lines=settings.telemetry.log_format == "json",
        fresh_interpreter=settings.launch.fresh_interpreter,
    )


def variables_of(settings: Settings, chosen: Collection[str]) -> dict[str, str]:
    """Return settings as variables for a program that uses tandem: the chosen ones and the run directory.

    Leaves out the task, because there is none, and the agent's settings: nodes, ranks and the metrics page.
    """
    texts = settings.to_dict()
    ours = {name for name, setting in SETTINGS.items() if setting.slice in ("launch", "metrics")}
    names = {*chosen, "run_dir", "resume"} & (SETTINGS.keys() - ours - {"task", "task_fields"})
    return {SETTINGS[name].variable: plain(texts[name]) for name in sorted(names)}
