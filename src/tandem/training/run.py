"""The composition root: the function that every rank runs, from an open process group to an exit code."""

import logging
import os
import platform as machine
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tandem import __version__
from tandem.checkpoint.state import ResumeDecision, decide_resume, deserialize, weights_sha256
from tandem.checkpoint.store import CheckpointStore
from tandem.checkpoint.writer import CheckpointWriter
from tandem.cluster.world import Position, World, choose_device, first_line, is_peer_loss
from tandem.config import Settings
from tandem.data.loader import train_batches
from tandem.data.sampler import GlobalOrder, TrainBatches
from tandem.errors import FAILED, FINISHED, PEER_LOST, STOPPED, ConfigError, StoppedError, TandemError
from tandem.log import redirect_output, setup
from tandem.observe.journal import Journal, write_json_atomic
from tandem.observe.progress import Progress
from tandem.observe.recorder import Recorder, Send
from tandem.observe.tensorboard import EventWriter
from tandem.schedule import Cadence
from tandem.signals import StopFlag
from tandem.tasks.base import Task, load_task
from tandem.training.evaluate import evaluate
from tandem.training.loop import Timetable, Training, train
from tandem.training.optim import Schedule, build_optimizer
from tandem.training.seeding import seed_model
from tandem.training.step import Stepper

log = logging.getLogger("tandem.run")

PER_NODE = {"node_rank", "master", "run_dir", "data_dir", "metrics_host", "metrics_port", "threads", "log_format"}
COMPLETE = -1


def run_rank(settings_dict: dict[str, object], position: Position, send: Send | None = None) -> int:
    """Train as the rank at `position`; the exit code (see `errors`). Handlers are installed first thing.

    `send` takes messages for the metrics; under the agent they go to `position.sample_socket` instead.
    """
    started = time.monotonic()
    stop = StopFlag().install()
    settings = Settings.from_dict(settings_dict)
    run_dir = Path(str(settings.run_dir))
    try:
        _set_up_log(settings, position, run_dir)
        return _run(settings, position, run_dir, stop, send or _sender(position), started)
    except TandemError as error:
        log.error("%s", error)
        return error.exit_code
    except Exception as error:
        if is_peer_loss(error):
            log.error("lost the other ranks: %s", first_line(error))
            return PEER_LOST
        log.error("the task failed: %s\n%s", first_line(error), traceback.format_exc().rstrip())
        return FAILED


def _set_up_log(settings: Settings, position: Position, run_dir: Path) -> None:
    path = run_dir / "log" / f"rank-{position.rank}.log"
    if position.rank != 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            redirect_output(path)
        except OSError:  # a worker needs no volume: without one its words go to the terminal
            setup(None, position.rank, position.node_rank, True, settings.log_format == "json")
            return
        setup(None, position.rank, position.node_rank, True, settings.log_format == "json")
    else:
        setup(path, 0, position.node_rank, True, settings.log_format == "json")


def _sender(position: Position) -> Send:
    if position.sample_socket is None:
        return lambda message: None
    from tandem.observe.server import SampleSender

    return SampleSender(Path(position.sample_socket)).send


@dataclass(frozen=True)
class Beginning:
    """Where this world begins: the state to load (None: fresh) and its step, equal on all ranks."""

    step: int
    state: dict[str, Any] | None
    changes: list[str]


def _run(
    settings: Settings, position: Position, run_dir: Path, stop: StopFlag, send: Send, started: float
) -> int:
    recorder = Recorder(position.rank, settings.batch_size, send)
    threads = set_threads(settings, position)
    device = choose_device(settings.device, position.local_rank)
    store = CheckpointStore(run_dir / "checkpoints")
    decision = decide_here(settings, position, store)
    with recorder.activity("rendezvous"):
        world = World.open(position, device, settings.first_step_timeout)
        world.check_same_settings({k: v for k, v in settings.to_dict().items() if k not in PER_NODE})
    task = load_task(settings.task, settings.task_fields, settings.data_dir, settings.download)
    prepare: Callable[[], None] = getattr(task, "prepare", lambda: None)
    world.once_per_node(prepare)
    datasets = task.build_datasets()
    order = GlobalOrder(len(datasets.train), settings.batch_size, settings.seed)
    planned = settings.steps or settings.epochs * order.steps_per_epoch
    seed_model(settings.seed)
    model = _place(task, task.build_model(), device)
    if settings.sync_batchnorm:
        model = world.synchronise_batchnorm(model)
    optimizer = build_optimizer(settings, task, model)
    schedule = Schedule(settings, task, optimizer, order.steps_per_epoch, planned)
    with recorder.activity("resume"):
        beginning = _begin(world, store, position, decision, recorder)
        if beginning.step == COMPLETE:
            return _leave(world, recorder, FINISHED)
        _check_division(settings, world, fresh=beginning.state is None)
        if beginning.state is not None:
            load_state(beginning.state, model, optimizer, schedule)
        elif settings.init_from is not None:
            load_weights(world, settings.init_from, model)
        if beginning.state is not None and hasattr(task, "after_resume"):
            task.after_resume(model)
    stepper = Stepper(world, settings, task, model, optimizer)
    if beginning.state is not None and "scaler" in beginning.state:
        stepper.scaler.load_state_dict(beginning.state["scaler"])

    writer = CheckpointWriter(store, settings.checkpoint_keep, settings.checkpoint_failures_allowed)

    def save(step: int) -> None:
        if not world.is_first:
            return
        began = time.monotonic()
        result = writer.save(
            step,
            {
                "step": step,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state(),
                "scaler": stepper.scaler.state_dict(),
            },
            manifest_info(settings, world, order, planned, step, threads, recorder.scores),
        )
        recorder.saved(step, time.monotonic() - began, result.bytes if result else None)

    batches = TrainBatches(
        order, world.rank, world.size, settings.micro_batch_size, beginning.step, planned
    )
    training = Training(
        world=world,
        settings=settings,
        model=model,
        stepper=stepper,
        schedule=schedule,
        timetable=Timetable(
            {
                "log": Cadence.parse(settings.log_every),
                "eval": Cadence.parse(settings.eval_every),
                "save": Cadence.parse(settings.checkpoint_every),
            },
            order.steps_per_epoch,
            planned,
        ),
        recorder=recorder,
        stop=stop,
        batches=_steps(settings, task, datasets.train, batches, device),
        evaluate=lambda: evaluate(
            world, task, model, datasets.evaluation, evaluation_batch_size(settings, world), settings.workers
        ),
        save=save,
        step=beginning.step,
    )
    _open_displays(settings, world, run_dir, recorder, order, planned, beginning, model, datasets.train, threads)
    finished = train(training)
    if world.is_first and writer.last_step != training.step and not (finished and writer.failures_in_a_row == 0):
        raise StoppedError(f"stopped at step {training.step}, but the checkpoint could not be written")
    code = FINISHED if finished else STOPPED
    if world.is_first:
        write_summary(run_dir, settings, position, recorder, order, model, writer, beginning, code, started)
    return _leave(world, recorder, code)


def set_threads(settings: Settings, position: Position) -> int:
    """CPU threads of this rank: what `--threads` says, or the cores it can count on."""
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // position.ranks_on_host) if settings.threads == "auto" else int(settings.threads)
    torch.set_num_threads(threads)
    return threads


def decide_here(settings: Settings, position: Position, store: CheckpointStore) -> ResumeDecision | None:
    """The resume decision of a run without an agent (which otherwise has made it before any rank started)."""
    if position.store is not None or position.rank != 0:
        return None
    return decide_resume(settings, store)


def _begin(
    world: World,
    store: CheckpointStore,
    position: Position,
    decision: ResumeDecision | None,
    recorder: Recorder,
) -> Beginning:
    """Rank 0 reads the newest valid checkpoint, or the one that the agent chose; all get it by broadcast."""
    step, payload = 0, b""
    if world.is_first and decision is not None and decision.kind == "complete":
        log.info("the run is complete at step %d; raise --epochs or --steps to go on", decision.step)
        step = COMPLETE
    elif world.is_first:
        found = store.newest_valid(lambda bad, problem: _quarantined(recorder, bad, problem))
        other = (decision.directory, decision.step) if decision and decision.directory else position.start_from
        if found is None and other is not None and other[0] is not None:
            raw, _info = CheckpointStore(Path(other[0])).read(other[1])
            found = (other[1], raw, _info)
        if found is not None:
            step, payload = found[0], found[1]
    step = int(world.broadcast_json(step))
    if step <= 0:
        return Beginning(step, None, [])
    began = time.monotonic()
    state = deserialize(world.broadcast_bytes(payload if world.is_first else None))
    recorder.message(
        {
            "inc": [["tandem_checkpoint_loads", {}, 1]],
            "set": [["tandem_checkpoint_last_load_duration_seconds", {}, time.monotonic() - began]],
        }
    )
    return Beginning(step, state, decision.changes if decision is not None else [])


def _quarantined(recorder: Recorder, step: int, problem: str) -> None:
    log.warning("checkpoint step %d is damaged (%s): set aside, using the one before", step, problem)
    recorder.event("fallback", step=step, problem=problem)
    recorder.message({"inc": [["tandem_checkpoint_fallbacks", {}, 1], ["tandem_checkpoint_load_failures", {}, 1]]})


def load_state(
    state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule
) -> None:
    """Load a checkpoint's state; ConfigError when it is of another model (the checkpoint is left alone)."""
    mine, theirs = model.state_dict(), state["model"]
    for name in sorted({*mine, *theirs}):
        here = tuple(mine[name].shape) if name in mine else "missing"
        there = tuple(theirs[name].shape) if name in theirs else "missing"
        if here != there:
            raise ConfigError(
                f"the checkpoint is of another model: {name} is {there} in it and {here} in this model; "
                "give another --run-dir or --resume never"
            )
    model.load_state_dict(theirs)
    optimizer.load_state_dict(state["optimizer"])
    schedule.load(state["schedule"])


def load_weights(world: World, path: Path, model: nn.Module) -> None:
    """`--init-from`: load the keys whose names and shapes match, and say which did not."""
    raw: bytes | None = None
    if world.is_first:
        found = CheckpointStore(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
        if path.is_file():
            raw = path.read_bytes()
        elif (newest := found.newest_step(lambda _step, _problem: None, quarantine=False)) is not None:
            raw = found.read(newest)[0]
        else:
            raise ConfigError(f"--init-from {path}: no checkpoint or weights file there")
    state = deserialize(world.broadcast_bytes(raw))
    weights = state.get("model", state)
    mine = model.state_dict()
    fitting = {
        name: value
        for name, value in weights.items()
        if name in mine and isinstance(value, torch.Tensor) and value.shape == mine[name].shape
    }
    model.load_state_dict(fitting, strict=False)
    left = sorted(set(mine) - set(fitting))
    log.info(
        "loaded %d of %d tensors from %s%s",
        len(fitting),
        len(mine),
        path,
        f"; left at their start: {', '.join(left)}" if left else "",
    )


def manifest_info(
    settings: Settings,
    world: World,
    order: GlobalOrder,
    planned: int,
    step: int,
    threads: int,
    scores: Mapping[str, float],
) -> dict[str, Any]:
    """What the manifest says about a checkpoint, so that the decision to resume needs no torch.load."""
    return {
        "step": step,
        "epoch": step // order.steps_per_epoch,
        "task": settings.task,
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


def evaluation_batch_size(settings: Settings, world: World) -> int:
    """Samples per rank and evaluation pass: at least 256, independent of how training is cut."""
    return max(256, settings.batch_size // world.size)


def _check_division(settings: Settings, world: World, fresh: bool) -> None:
    if fresh and settings.batch_size % world.size:
        below = settings.batch_size - settings.batch_size % world.size
        raise ConfigError(
            f"--batch-size {settings.batch_size} does not divide over {world.size} ranks; "
            f"use {below or world.size} or {below + world.size}"
        )


def _place(task: Task, model: nn.Module, device: torch.device) -> nn.Module:
    place = getattr(task, "place", None)
    placed = place(model, device) if place is not None else model.to(device)
    return placed if isinstance(placed, nn.Module) else model


def _steps(
    settings: Settings, task: Task, dataset: Any, batches: TrainBatches, device: torch.device
) -> Iterator[list[Any]]:
    """Lists of micro-batches, one list per optimizer step."""
    stream = train_batches(
        dataset,
        batches,
        seed=settings.seed,
        workers=settings.workers,
        collate=getattr(task, "collate", None),
        device=device,
    )
    for step in range(batches.start_step, batches.stop_step):
        yield list(islice(stream, batches.micro_steps(step)))


def _open_displays(
    settings: Settings,
    world: World,
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
    if beginning.step:
        journal.rewind(beginning.step)
        journal.event("resumed", step=beginning.step)
    writer = EventWriter(run_dir / "tensorboard", beginning.step) if settings.tensorboard else None
    progress = Progress(planned, start_step=beginning.step, mode=settings.progress)
    recorder.begin_run(beginning.step, order.steps_per_epoch, planned, journal, progress, writer)
    recorder.message(identity(settings, world.position, world.device, run_dir))
    for change in beginning.changes:
        log.info("changed since the checkpoint: %s", change)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    log.info(
        "%s: %s samples, %s parameters; %d ranks on %d nodes (%s), each %s of a batch of %d in %s, %d threads",
        settings.task,
        f"{order.n:,}",
        f"{parameters:,}",
        world.size,
        world.position.nodes,
        world.device.type,
        f"{settings.batch_size / world.size:g}",
        settings.batch_size,
        settings.precision,
        threads,
    )
    log.info(
        "steps %d to %d, %d an epoch%s",
        beginning.step,
        planned,
        order.steps_per_epoch,
        f"; resumed from step {beginning.step}" if beginning.step else "",
    )


def identity(
    settings: Settings, position: Position, device: torch.device, run_dir: Path
) -> dict[str, object]:
    """The identity group of the metrics."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else ""
    return {
        "info": [
            [
                "tandem_build_info",
                {
                    "version": __version__,
                    "revision": "",
                    "python": machine.python_version(),
                    "torch": torch.__version__,
                    "cuda": torch.version.cuda or "",
                    "nccl": nccl,
                },
            ],
            [
                "tandem_run_info",
                {
                    "run": settings.run_name or run_dir.name,
                    "task": settings.task,
                    "platform": position.platform,
                    "backend": "nccl" if device.type == "cuda" else "gloo",
                    "precision": settings.precision,
                    "config_hash": settings.digest(),
                },
            ],
        ],
        "set": [
            ["tandem_world_size", {}, position.world_size],
            ["tandem_nodes", {}, position.nodes],
        ],
    }


def write_summary(
    run_dir: Path,
    settings: Settings,
    position: Position,
    recorder: Recorder,
    order: GlobalOrder,
    model: nn.Module,
    writer: CheckpointWriter,
    beginning: Beginning,
    code: int,
    started: float,
) -> None:
    """RUN_DIR/summary.json, and the same in a few words on the terminal."""
    digest = weights_sha256(model)
    summary = {
        "state": "finished" if code == FINISHED else "stopped",
        "exit_code": code,
        "task": settings.task,
        "platform": position.platform,
        "world_size": position.world_size,
        "nodes": position.nodes,
        "epoch": recorder.step // order.steps_per_epoch,
        "global_step": recorder.step,
        "samples_seen": recorder.step * settings.batch_size,
        "loss": recorder.loss,
        "eval": recorder.scores,
        "samples_per_second": round(recorder.meter.samples_per_second, 1),
        "wall_seconds": round(time.monotonic() - started, 3),
        "weights_sha256": digest,
        "restarts": position.restart,
        "resumed_from_step": beginning.step or None,
        "last_checkpoint_step": writer.last_step,
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
    )


def _leave(world: World, recorder: Recorder, code: int) -> int:
    recorder.close()
    world.close()
    return code
