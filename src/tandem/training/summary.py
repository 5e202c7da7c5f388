"""Describe a run: its identity, its first log lines, the facts in manifests, and the final summary."""

import logging
import platform as machine
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from tandem import __version__, layout
from tandem.checkpoint.state import weights_sha256
from tandem.config.slices import RunConfig, TelemetryConfig
from tandem.data.sampler import GlobalOrder
from tandem.distributed.group import ProcessGroup
from tandem.errors import FINISHED
from tandem.log import pluralize, reporting
from tandem.run.directory import RunDir
from tandem.telemetry import metrics
from tandem.telemetry.displays import EventWriter, Progress
from tandem.telemetry.journal import Restarts
from tandem.telemetry.meter import Interval
from tandem.telemetry.metrics import Sample
from tandem.telemetry.recorder import Recorder
from tandem.text import format_duration, relative_path

log = logging.getLogger("tandem.run")


@dataclass(frozen=True)
class RunInfo:
    """Facts about this generation of a run that do not change while it trains.

    `settings` and `fingerprint` are stored in the manifest; `config_hash` is their digest. `started` is a
    time of time.monotonic(). The run resumes after `first_step` steps, from `resumed_from`. `shares`: samples
    of each rank in a batch; empty if equal. `data`: see `fingerprint.data_facts`. `micro_batch`: the
    micro-batch size that replaces the setting, because larger ones ran out of memory. `restart`: how often
    the agent has restarted its ranks.
    """

    run: RunConfig
    batch_size: int
    precision: str
    settings: Mapping[str, object]
    fingerprint: Mapping[str, object]
    config_hash: str
    world: ProcessGroup
    directory: RunDir
    order: GlobalOrder
    planned: int
    threads: int
    first_step: int
    started: float
    resumed_from: str = ""
    shares: tuple[int, ...] = ()
    data: Mapping[str, object] = field(default_factory=dict)
    micro_batch: int | None = None
    restart: int = 0


def identity(facts: RunInfo, save_steps: int | None) -> list[Sample]:
    """Return the metrics of the identity group, and the steps between checkpoints (0: not by steps)."""
    position = facts.world.position
    on_gpu = facts.world.device.type == "cuda"
    version: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
    return [
        metrics.BUILD_INFO.set(
            version=__version__,
            revision="",
            python=machine.python_version(),
            torch=torch.__version__,
            cuda=torch.version.cuda or "",
            nccl=".".join(map(str, version())) if on_gpu else "",
        ),
        metrics.RUN_INFO.set(
            run=facts.directory.folder.name,
            task=facts.run.task,
            platform=position.platform,
            backend="nccl" if on_gpu else "gloo",
            precision=facts.precision,
            config_hash=facts.config_hash,
        ),
        metrics.WORLD_SIZE.set(position.world_size),
        metrics.NODES.set(position.nodes),
        metrics.CHECKPOINT_INTERVAL_STEPS.set(save_steps or 0),
    ]


def manifest_info(
    facts: RunInfo, step: int, scores: Mapping[str, float], is_end: bool, owes_evaluation: bool
) -> dict[str, Any]:
    """Return the description of a checkpoint for its manifest; the resume decision reads nothing else.

    `is_end`: the task ended the run at this step, before the last planned one. `owes_evaluation`: the run
    failed during the evaluation of this step.
    """
    order = facts.order
    return {
        "step": step,
        "epoch": step // order.steps_per_epoch,
        "task": facts.run.task,
        "settings": facts.settings,
        "fingerprint": facts.fingerprint,
        "world_size": facts.world.size,
        "threads": facts.threads,
        "steps_per_epoch": order.steps_per_epoch,
        "steps_planned": facts.planned,
        "train_samples": order.n,
        "data": dict(facts.data),
        "time": time.time(),
        "eval": dict(scores),
        **({"ended_of": facts.planned} if is_end else {}),
        **({"micro_batch_fits": facts.micro_batch} if facts.micro_batch is not None else {}),
        **({"owes_evaluation": True} if owes_evaluation else {}),
    }


def write_summary(
    facts: RunInfo,
    recorder: Recorder,
    weights: Mapping[str, Any],
    saved_step: int | None,
    code: int,
    ended_early: bool,
    used: Mapping[str, object],
) -> None:
    """Write RUN_DIR/summary.json, and log the same as a line with a table.

    `used`: facts about the optimizer, if known (`Schedule.used`).
    """
    position = facts.world.position
    digest = weights_sha256(weights)
    restarts = Restarts(facts.directory.events())
    summary = {
        "state": "finished" if code == FINISHED else "stopped",
        "exit_code": code,
        "ended_early": ended_early,
        "task": facts.run.task,
        "platform": position.platform,
        "world_size": position.world_size,
        "nodes": position.nodes,
        "epoch": recorder.step // facts.order.steps_per_epoch,
        "global_step": recorder.step,
        "samples_seen": facts.order.samples_before(recorder.step),
        "loss": recorder.last_loss,
        "eval": recorder.scores,
        "samples_per_second": round(recorder.meter.samples_per_second, 1),
        "wall_seconds": round(time.monotonic() - facts.started, 3),
        "weights_sha256": digest,
        **used,
        # The events cover all launches, but a full disk may have lost some; the agent counts this launch.
        "restarts": max(facts.restart, restarts.total),
        "planned_stops": restarts.planned_stops,
        "resumed_from_step": facts.first_step or None,
        "last_checkpoint_step": saved_step,
    }
    with reporting("write summary.json"):
        facts.directory.write_summary(summary)
    recorder.event(str(summary["state"]), step=recorder.step, exit_code=code)
    scores = ", ".join(f"{name} {value:.4f}" for name, value in recorder.scores.items())
    log.info(
        "%s at step %s%s: %s; %s samples/s; weights %s",
        summary["state"],
        f"{recorder.step:,}",
        f" of {facts.planned:,}, ended by after_evaluation" if ended_early else "",
        scores or "not evaluated",
        f"{recorder.meter.samples_per_second:,.0f}",
        digest[:12],
        extra={
            "table": ending_table(summary, recorder.meter.total, facts.directory.where, facts.micro_batch)
        },
    )


def ending_table(
    summary: Mapping[str, Any], steps: Interval, run_dir: PurePath, micro_batch: int | None = None
) -> dict[str, str]:
    """Return the lines of the table that is logged at the end, as {name: text}; `steps`: of this launch.

    `micro_batch`: see `RunInfo`.
    """
    smaller = (
        {} if micro_batch is None else {"micro-batch": f"{micro_batch}, as larger ones ran out of memory"}
    )
    resumed = summary["resumed_from_step"]
    saved = summary["last_checkpoint_step"]
    since = f" since step {resumed:,}" if resumed else ""
    pace = f"{summary['samples_per_second']:,.0f} a second{since}"
    directory = relative_path(run_dir)
    again = (
        f"; to resume: the same command with --run-dir {directory}" if summary["state"] == "stopped" else ""
    )
    shares = [f"{name} {part / steps.seconds:.0%}" for name, part in steps.phases.items() if steps.seconds]
    return {
        "steps": f"{summary['global_step']:,}, epoch {summary['epoch']}"
        + (f"; resumed from step {resumed:,}" if resumed else "")
        + ("; ended by after_evaluation" if summary["ended_early"] else ""),
        "samples": f"{summary['samples_seen']:,} in total, {pace}",
        "loss": f"{summary['loss']:.4f} (training)" if steps.steps else "none: no steps were taken",
        **{name: f"{value:.4f} (evaluation)" for name, value in summary["eval"].items() if name != "loss"},
        "time": f"{format_duration(summary['wall_seconds'])}{since}, "
        f"{format_duration(steps.seconds)} of it in steps",
        "a step": ", ".join(shares) or "none taken",
        **smaller,
        "ranks": f"{summary['world_size']} on {pluralize(summary['nodes'], 'node')}, "
        f"restarts: {summary['restarts']}"
        + (f", planned stops: {summary['planned_stops']}" if summary["planned_stops"] else ""),
        "checkpoint": "none saved" if saved is None else f"step {saved:,} in {directory}/checkpoints{again}",
    }


def open_displays(
    facts: RunInfo, display: TelemetryConfig, save_steps: int | None, recorder: Recorder, model: nn.Module
) -> None:
    """Open the journal, TensorBoard and the progress display on rank 0, and log the derived numbers once.

    Removes the summary of an earlier end.
    """
    step = facts.first_step
    epoch_steps = facts.order.steps_per_epoch
    planned = facts.planned
    if not facts.world.is_first:
        recorder.begin_run(step, epoch_steps, planned, None, None, None)
        return
    # Otherwise, the summary of an earlier end would describe a run that is killed now.
    with reporting("remove the old summary.json"):
        facts.directory.forget_summary()
    if facts.micro_batch is not None:
        with reporting("write config.json"):
            facts.directory.record_micro_batch(facts.micro_batch)
    journal = facts.directory.journal
    journal.rewind(step)  # even to 0: the run may have been killed before its first checkpoint
    if step:
        journal.event("resumed", step=step, source=facts.resumed_from)
        recorder.recall(step, journal.scores_at(step))
    tensorboard = facts.directory.folder / layout.TENSORBOARD
    writer = EventWriter(tensorboard, step) if display.has_tensorboard else None
    progress = Progress(planned, start_step=step, mode=display.progress)
    recorder.begin_run(step, epoch_steps, planned, journal, progress, writer)
    recorder.samples(*identity(facts, save_steps))
    _log_derived_numbers(facts, model)


def _batch_of(facts: RunInfo) -> str:
    parts = "" if facts.micro_batch is None else f" in micro-batches of {facts.micro_batch}"
    return f"{facts.batch_size:,}{parts}"


def _log_derived_numbers(facts: RunInfo, model: nn.Module) -> None:
    world = facts.world
    parameters = sum(parameter.numel() for parameter in model.parameters())
    log.info(
        "%s: %s samples, %s parameters; %s on %s (%s), each with %s of a batch of %s, %s, %s",
        facts.run.task,
        f"{facts.order.n:,}",
        f"{parameters:,}",
        pluralize(world.size, "rank"),
        pluralize(world.position.nodes, "node"),
        world.device.type,
        ":".join(map(str, facts.shares)) or f"{facts.batch_size / world.size:g}",
        _batch_of(facts),
        facts.precision,
        pluralize(facts.threads, "thread"),
    )
    log.info(
        "steps %s to %s, %s per epoch%s",
        *(f"{each:,}" for each in (facts.first_step, facts.planned, facts.order.steps_per_epoch)),
        f"; resumed from step {facts.first_step:,}" if facts.first_step else "",
    )
