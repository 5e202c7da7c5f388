"""Train a task: the workload of `tandem launch --task`."""

from collections.abc import Callable, Collection, Mapping, Sequence

from tandem.checkpoint.decision import ResumeDecision, decide_resume
from tandem.checkpoint.listing import is_finished
from tandem.code_files import CodeFile, imported_code
from tandem.config import Settings, TaskJob
from tandem.config.slices import ONE_PROCESS
from tandem.data.batch_shares import check_even
from tandem.distributed.position import RankStart
from tandem.errors import PEER_LOST, CheckpointError, ConfigError, is_retried, job_code
from tandem.log import log_if_slow
from tandem.platforms.detection import Placement
from tandem.run.directory import RunDir
from tandem.work.base import (
    NOTHING,
    SAVED,
    TRAINED,
    Cause,
    GenerationEnd,
    RankFunction,
    WarmUp,
    any_rank,
    gpu_index,
)


def rank_function() -> Callable[..., int]:
    """Import the function of a task's ranks. It imports torch, so the agent sets torch's variables first."""
    from tandem.rank.task import run_rank

    return run_rank


def run_rank(job: TaskJob, start: RankStart) -> int:
    """Train as the rank that `start` describes, and return the exit code."""
    return rank_function()(job, start)


def warm_up(job: TaskJob, expected: RankStart | None) -> None:
    """Prepare a process that may become a rank."""
    from tandem.rank import task

    task.warm_up(job, expected)


class TaskWorkload:
    """A task's ranks are tandem's own: they report to the agent, and tandem saves their state.

    `chosen` has the names of the settings that were set explicitly.
    """

    saves = True
    has_own_store = False
    logs_errors = True
    charges_all = False
    words: Sequence[str] = ()

    def __init__(self, run: RunDir, settings: Settings, chosen: Collection[str]) -> None:
        self._run = run
        self._settings = settings
        self._code: Mapping[str, CodeFile] = {}  # the task's, once it is imported
        self.rank_entry: RankFunction = run_rank
        self.warm_up: WarmUp = warm_up
        self.job = TaskJob(settings.to_dict(), frozenset(chosen))
        self.preload: Sequence[str] = ["tandem.launch.preload", "tandem.rank.task"]
        self.standby_key: Callable[..., object] = gpu_index if settings.launch.warm_gpu else any_rank
        self.is_retried = is_retried

    def check(self, placement: Placement, gpus: Callable[[], Sequence[str]]) -> None:
        """Raise ConfigError if the ranks cannot share the batch evenly. In doubt, the ranks decide later.

        Only node 0 checks. A run that resumes from a checkpoint may share its batch unevenly, and other nodes
        may not see the checkpoints.
        """
        data = self._settings.data
        ranks = self._ranks(placement, gpus)
        if ranks is None or placement.node_rank != 0 or data.batch_shares is not None:
            return
        if self._begins_afresh():
            check_even(data.batch_size, ranks)

    def _ranks(self, placement: Placement, gpus: Callable[[], Sequence[str]]) -> int | None:
        """Return the number of ranks of the job, or None if only its nodes can determine it.

        A strategy with a single process has its own check.
        """
        compute = self._settings.compute
        if placement.elastic is not None or compute.strategy_name in ONE_PROCESS:
            return None
        nproc = placement.nproc
        if nproc is None:  # depends on the GPUs of each node
            nproc = 1 if compute.device == "cpu" or (placement.is_one_host and not gpus()) else None
        return None if nproc is None else placement.nodes * nproc

    def _begins_afresh(self) -> bool:
        """Return whether the run certainly starts fresh.

        No checkpoint is read, and no object store is queried.
        """
        resume = self._settings.checkpoint.resume
        if resume == "never":
            return True
        try:
            # A run in an object store counts as uncertain; its ranks check the batch later.
            return resume == "auto" and self._run.is_here and not self._run.checkpoints.steps()
        except CheckpointError:
            return False

    def prepare(self, placement: Placement) -> ResumeDecision | None:
        from tandem.tasks.base import load_task

        asked = self._settings.run
        data = self._settings.data
        if placement.elastic is not None and data.batch_shares is not None:
            raise ConfigError(
                f"--batch-shares {data.batch_shares} needs a fixed number of ranks, but --elastic changes "
                "it; use only one of them"
            )
        decision = None
        if placement.node_rank == 0:
            with log_if_slow("reading the checkpoints"):
                decision = decide_resume(self._settings, self._run.checkpoints)
            # No rank will run, so the task need no longer be importable.
            if decision.kind == "complete":
                return decision
        with log_if_slow(f"importing the task {asked.task}"):
            load_task(asked.task, asked.task_fields, data.data_dir, data.download)
        self._code = imported_code()
        return decision

    def code(self) -> Mapping[str, CodeFile]:
        return self._code

    def standby_code(self) -> object:
        """Return the digests of the task's files, which `warm_up` imports."""
        return [each.now().digest for each in self._code.values()]

    def progress(self, has_trained: bool, resume: ResumeDecision) -> str:
        if has_trained:
            return TRAINED
        return SAVED if resume.kind == "resume" else NOTHING

    def is_done(self) -> bool:
        """Return whether the last step is saved."""
        return is_finished(self._run.checkpoints)

    def explain(self, end: GenerationEnd) -> tuple[int, Cause | None]:
        code = job_code([code for code in end.codes.values() if code is not None])
        # 200 alone explains nothing. If all peers are on this node, or a rank has reported an error, the
        # cause is here and its process is about to end.
        if code == PEER_LOST and (end.positions[0].nodes == 1 or end.last_words):
            code = job_code(list(end.blamed().values()))
        return code, None

    def last_line(self, code: int, restarts: int) -> str:
        """Return "": rank 0 has printed the run's summary, or the error that ended it."""
        return ""
