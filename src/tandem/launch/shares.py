"""Reject a batch that the ranks cannot share evenly before anything starts, if their number is known."""

from collections.abc import Mapping

from tandem.config import Settings
from tandem.config.slices import ONE_PROCESS
from tandem.data.shares import check_even
from tandem.errors import CheckpointError
from tandem.launch.gpus import gpus_of
from tandem.platforms.placement import Placement
from tandem.run.directory import RunDir


def refuse_uneven(run: RunDir, settings: Settings, placement: Placement, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if the ranks would later; leave what is uncertain to them.

    Only node 0 checks. A run that resumes from a checkpoint may share its batch unevenly, and the other nodes
    may not see the checkpoints.
    """
    ranks = _ranks(settings, placement, environ)
    if ranks is None or placement.node_rank != 0 or settings.data.batch_shares is not None:
        return
    if _begins_afresh(run, settings):
        check_even(settings.data.batch_size, ranks)


def _ranks(settings: Settings, placement: Placement, environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks of the job, or None if only its nodes will know.

    A strategy with a single process has its own check.
    """
    if placement.elastic is not None or settings.compute.strategy_name in ONE_PROCESS:
        return None
    nproc = placement.nproc
    if nproc is None:  # depends on the GPUs of each node
        has_none = settings.compute.device == "cpu" or (placement.is_one_host and not gpus_of(environ))
        nproc = 1 if has_none else None
    return None if nproc is None else placement.nodes * nproc


def _begins_afresh(run: RunDir, settings: Settings) -> bool:
    """Return whether the run certainly starts fresh.

    No checkpoint is read, and no object store is queried.
    """
    resume = settings.checkpoint.resume
    if resume == "never":
        return True
    try:
        return resume == "auto" and run.is_here and not run.checkpoints.steps()
    except CheckpointError:
        return False
