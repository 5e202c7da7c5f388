"""What a run says of itself: identity, the first sentences, the manifest's facts, the summary at the end."""

import logging
import platform as machine
import time
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from tandem import __version__
from tandem.checkpoint.state import weights_sha256
from tandem.checkpoint.storage import address
from tandem.config import Settings
from tandem.data.sampler import GlobalOrder
from tandem.distributed.group import Position, ProcessGroup
from tandem.errors import FINISHED
from tandem.schedule import Cadence
from tandem.telemetry import metrics
from tandem.telemetry.families import Sample
from tandem.telemetry.journal import Journal, write_json_atomic
from tandem.telemetry.progress import Progress
from tandem.telemetry.recorder import Recorder
from tandem.telemetry.tensorboard import EventWriter
from tandem.training.resume import Beginning

log = logging.getLogger("tandem.run")


def identity(
    settings: Settings, position: Position, device: torch.device, run_dir: Path, save_steps: int | None
) -> list[Sample]:
    """The identity group of the metrics, and `save_steps` between checkpoints (None: not by steps)."""
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
            run=settings.run.run_name or run_dir.name,
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


def manifest_info(
    settings: Settings,
    world: ProcessGroup,
    order: GlobalOrder,
    planned: int,
    step: int,
    threads: int,
    scores: Mapping[str, float],
) -> dict[str, Any]:
    """What the manifest says about a checkpoint, so that the decision to resume needs no torch.load."""
    warn_of_missing_score(settings.checkpoint.keep_best, step, scores)
    return {
        "step": step,
        "epoch": step // order.steps_per_epoch,
        "task": settings.run.task,
        "settings": settings.to_dict(),
        "fingerprint": settings.fingerprint_fields(),
        "world_size": world.size,
        "threads": threads,
        "steps_per_epoch": order.steps_per_epoch,
        "steps_planned": planned,
        "train_samples": order.n,
        "time": time.time(),
        "eval": dict(scores),
    }


def write_summary(
    run_dir: Path,
    settings: Settings,
    position: Position,
    recorder: Recorder,
    order: GlobalOrder,
    weights: Mapping[str, Any],
    last_checkpoint_step: int | None,
    beginning: Beginning,
    code: int,
    started: float,
) -> None:
    """RUN_DIR/summary.json, and the same as a line and a table on the terminal."""
    digest = weights_sha256(weights)
    summary = {
        "state": "finished" if code == FINISHED else "stopped",
        "exit_code": code,
        "task": settings.run.task,
        "platform": position.platform,
        "world_size": position.world_size,
        "nodes": position.nodes,
        "epoch": recorder.step // order.steps_per_epoch,
        "global_step": recorder.step,
        "samples_seen": recorder.step * settings.data.batch_size,
        "loss": recorder.loss,
        "eval": recorder.scores,
        "samples_per_second": round(recorder.meter.samples_per_second, 1),
        "wall_seconds": round(time.monotonic() - started, 3),
        "weights_sha256": digest,
        "restarts": position.restart,
        "resumed_from_step": beginning.step or None,
        "last_checkpoint_step": last_checkpoint_step,
    }
    write_json_atomic(run_dir / "summary.json", summary)
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
                address(str(settings.run.run_dir or run_dir)),
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


def open_displays(
    settings: Settings,
    world: ProcessGroup,
    run_dir: Path,
    recorder: Recorder,
    order: GlobalOrder,
    planned: int,
    beginning: Beginning,
    model: nn.Module,
    dataset: Any,
    threads: int,
) -> None:
    """Rank 0 opens its journal, TensorBoard and progress display, and says the derived numbers once."""
    if not world.is_first:
        recorder.begin_run(beginning.step, order.steps_per_epoch, planned, None, None, None)
        return
    journal = Journal(run_dir)
    journal.rewind(beginning.step)  # also to 0: a run that was killed before its first checkpoint
    if beginning.step:
        journal.event("resumed", step=beginning.step)
    writer = EventWriter(run_dir / "tensorboard", beginning.step) if settings.telemetry.tensorboard else None
    progress = Progress(planned, start_step=beginning.step, mode=settings.telemetry.progress)
    recorder.begin_run(beginning.step, order.steps_per_epoch, planned, journal, progress, writer)
    keep_best, save_every = settings.checkpoint.keep_best, settings.checkpoint.checkpoint_every
    eval_every = settings.evaluation.eval_every
    save_steps = Cadence.parse(save_every).to_steps(order.steps_per_epoch, planned)
    recorder.samples(*identity(settings, world.position, world.device, run_dir, save_steps))
    if keep_best and not evaluations_are_saved(eval_every, save_every, order.steps_per_epoch, planned):
        log.warning(
            "--keep-best %s: only a checkpoint saved at the step of an evaluation can be the best, and "
            "--checkpoint-every %s leaves out evaluations of --eval-every %s",
            keep_best,
            save_every,
            eval_every,
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    log.info(
        "%s: %s samples, %s parameters; %d ranks on %d nodes (%s), %s of a batch of %d each, %s, %d threads",
        settings.run.task,
        f"{order.n:,}",
        f"{parameters:,}",
        world.size,
        world.position.nodes,
        world.device.type,
        f"{settings.data.batch_size / world.size:g}",
        settings.data.batch_size,
        settings.compute.precision,
        threads,
    )
    log.info(
        "steps %d to %d, %d an epoch%s",
        beginning.step,
        planned,
        order.steps_per_epoch,
        f"; resumed from step {beginning.step}" if beginning.step else "",
    )
