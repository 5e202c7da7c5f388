"""What a run says of itself: identity, the first sentences, the manifest's facts, the summary at the end."""

import logging
import platform as machine
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from tandem import __version__
from tandem.checkpoint.state import weights_sha256
from tandem.checkpoint.storage import address
from tandem.config import Settings
from tandem.data.sampler import GlobalOrder
from tandem.distributed.group import ProcessGroup
from tandem.errors import FINISHED
from tandem.schedule import Cadence
from tandem.telemetry import metrics
from tandem.telemetry.families import Sample
from tandem.telemetry.journal import Journal, write_json_atomic
from tandem.telemetry.progress import Progress
from tandem.telemetry.recorder import Recorder
from tandem.telemetry.tensorboard import EventWriter

log = logging.getLogger("tandem.run")


@dataclass(frozen=True)
class Facts:
    """What does not change while this generation of a run trains.

    `run_dir` is on this machine, `started` is of time.monotonic(); it goes on after `first_step` steps.
    """

    settings: Settings
    world: ProcessGroup
    run_dir: Path
    order: GlobalOrder
    planned: int
    threads: int
    first_step: int
    started: float


def identity(facts: Facts) -> list[Sample]:
    """The identity group of the metrics, and the steps between checkpoints (0: not by steps)."""
    settings, position, device = facts.settings, facts.world.position, facts.world.device
    cadence = Cadence.parse(settings.checkpoint.checkpoint_every)
    save_steps = cadence.to_steps(facts.order.steps_per_epoch, facts.planned)
    version: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
    on_gpu = device.type == "cuda"
    return [
        metrics.BUILD_INFO.says(
            version=__version__,
            revision="",
            python=machine.python_version(),
            torch=torch.__version__,
            cuda=torch.version.cuda or "",
            nccl=".".join(map(str, version())) if on_gpu else "",
        ),
        metrics.RUN_INFO.says(
            run=settings.run.run_name or facts.run_dir.name,
            task=settings.run.task,
            platform=position.platform,
            backend="nccl" if on_gpu else "gloo",
            precision=settings.compute.precision,
            config_hash=settings.digest(),
        ),
        metrics.WORLD_SIZE.set(position.world_size),
        metrics.NODES.set(position.nodes),
        metrics.CHECKPOINT_INTERVAL_STEPS.set(save_steps or 0),
    ]


def manifest_info(facts: Facts, step: int, scores: Mapping[str, float]) -> dict[str, Any]:
    """What the manifest says about a checkpoint, so that the decision to resume needs no torch.load."""
    settings, order = facts.settings, facts.order
    warn_of_missing_score(settings.checkpoint.keep_best, step, scores)
    return {
        "step": step,
        "epoch": step // order.steps_per_epoch,
        "task": settings.run.task,
        "settings": settings.to_dict(),
        "fingerprint": settings.fingerprint_fields(),
        "world_size": facts.world.size,
        "threads": facts.threads,
        "steps_per_epoch": order.steps_per_epoch,
        "steps_planned": facts.planned,
        "train_samples": order.n,
        "time": time.time(),
        "eval": dict(scores),
    }


def write_summary(
    facts: Facts, recorder: Recorder, weights: Mapping[str, Any], saved_step: int | None, code: int
) -> None:
    """RUN_DIR/summary.json, and the same as a line and a table on the terminal."""
    settings, position = facts.settings, facts.world.position
    digest = weights_sha256(weights)
    summary = {
        "state": "finished" if code == FINISHED else "stopped",
        "exit_code": code,
        "task": settings.run.task,
        "platform": position.platform,
        "world_size": position.world_size,
        "nodes": position.nodes,
        "epoch": recorder.step // facts.order.steps_per_epoch,
        "global_step": recorder.step,
        "samples_seen": recorder.step * settings.data.batch_size,
        "loss": recorder.loss,
        "eval": recorder.scores,
        "samples_per_second": round(recorder.meter.samples_per_second, 1),
        "wall_seconds": round(time.monotonic() - facts.started, 3),
        "weights_sha256": digest,
        "restarts": position.restart,
        "resumed_from_step": facts.first_step or None,
        "last_checkpoint_step": saved_step,
    }
    write_json_atomic(facts.run_dir / "summary.json", summary)
    recorder.event(str(summary["state"]), step=recorder.step, exit_code=code)
    scores = ", ".join(f"{name} {value:.4f}" for name, value in recorder.scores.items())
    log.info(
        "%s at step %d: %s; %s samples/s; weights %s",
        summary["state"],
        recorder.step,
        scores or "not evaluated",
        f"{recorder.meter.samples_per_second:,.0f}",
        digest[:12],
        extra={
            "table": ending_table(
                summary,
                recorder.meter.seconds,
                recorder.meter.phases,
                address(str(settings.run.run_dir or facts.run_dir)),
            )
        },
    )


def ending_table(
    summary: Mapping[str, Any], step_seconds: float, phases: Mapping[str, float], run_dir: PurePath
) -> dict[str, str]:
    """What a person wants to know at the end, {name: text}; `phases` are seconds of its steps."""
    resumed = summary["resumed_from_step"]
    saved = summary["last_checkpoint_step"]
    shares = [f"{name} {seconds / step_seconds:.0%}" for name, seconds in phases.items() if step_seconds]
    return {
        "steps": f"{summary['global_step']:,}, epoch {summary['epoch']}"
        + (f"; resumed from step {resumed:,}" if resumed else ""),
        "samples": f"{summary['samples_seen']:,} in all, {summary['samples_per_second']:,.0f} a second",
        "loss": f"{summary['loss']:.4f}",
        **{name: f"{value:.4f} (evaluation)" for name, value in summary["eval"].items() if name != "loss"},
        "time": f"{summary['wall_seconds']:.1f} s, {step_seconds:.1f} s of it in steps",
        "a step": ", ".join(shares) or "none taken",
        "ranks": f"{summary['world_size']} on {summary['nodes']} nodes, restarts: {summary['restarts']}",
        "checkpoint": f"step {saved:,} in {run_dir / 'checkpoints'}" if saved is not None else "none saved",
    }


def evaluations_are_saved(eval_every: str, save_every: str, steps_per_epoch: int, planned: int) -> bool:
    """Whether a checkpoint is saved wherever an evaluation is due, so that --keep-best sees them all."""
    evaluated, saved = Cadence.parse(eval_every), Cadence.parse(save_every)
    if evaluated == saved:
        return evaluated.unit != "never"
    between = [cadence.to_steps(steps_per_epoch, planned) for cadence in (evaluated, saved)]
    return None not in between and between[0] % between[1] == 0  # type: ignore[operator]


def warn_of_missing_score(keep_best: str | None, step: int, scores: Mapping[str, float]) -> None:
    """A name that no evaluation gives is a typo, and shows at the first evaluation only."""
    if keep_best and scores and keep_best.partition(":")[0] not in scores:
        there = ", ".join(sorted(scores))
        log.warning("--keep-best %s: the evaluation at step %d gave %s", keep_best, step, there)


def open_displays(facts: Facts, recorder: Recorder, model: nn.Module) -> None:
    """Rank 0 opens its journal, TensorBoard and progress display, and says the derived numbers once."""
    step, epoch_steps, planned = facts.first_step, facts.order.steps_per_epoch, facts.planned
    if not facts.world.is_first:
        recorder.begin_run(step, epoch_steps, planned, None, None, None)
        return
    journal = Journal(facts.run_dir)
    journal.rewind(step)  # also to 0: a run that was killed before its first checkpoint
    if step:
        journal.event("resumed", step=step)
    display = facts.settings.telemetry
    writer = EventWriter(facts.run_dir / "tensorboard", step) if display.tensorboard else None
    progress = Progress(planned, start_step=step, mode=display.progress)
    recorder.begin_run(step, epoch_steps, planned, journal, progress, writer)
    recorder.samples(*identity(facts))
    _warn_of_unsaved_scores(facts)
    _say_derived_numbers(facts, model)


def _warn_of_unsaved_scores(facts: Facts) -> None:
    keep_best, save_every = facts.settings.checkpoint.keep_best, facts.settings.checkpoint.checkpoint_every
    eval_every, epoch_steps = facts.settings.evaluation.eval_every, facts.order.steps_per_epoch
    if keep_best and not evaluations_are_saved(eval_every, save_every, epoch_steps, facts.planned):
        log.warning(
            "--keep-best %s: only a checkpoint saved at the step of an evaluation can be the best, and "
            "--checkpoint-every %s leaves out evaluations of --eval-every %s",
            keep_best,
            save_every,
            eval_every,
        )


def _say_derived_numbers(facts: Facts, model: nn.Module) -> None:
    settings, world = facts.settings, facts.world
    parameters = sum(parameter.numel() for parameter in model.parameters())
    log.info(
        "%s: %s samples, %s parameters; %d ranks on %d nodes (%s), %s of a batch of %d each, %s, %d threads",
        settings.run.task,
        f"{facts.order.n:,}",
        f"{parameters:,}",
        world.size,
        world.position.nodes,
        world.device.type,
        f"{settings.data.batch_size / world.size:g}",
        settings.data.batch_size,
        settings.compute.precision,
        facts.threads,
    )
    log.info(
        "steps %d to %d, %d an epoch%s",
        facts.first_step,
        facts.planned,
        facts.order.steps_per_epoch,
        f"; resumed from step {facts.first_step}" if facts.first_step else "",
    )
