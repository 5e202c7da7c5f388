"""The composition root: the function that every rank runs, from an open process group to an exit code."""

import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tandem.checkpoint.retention import Retention
from tandem.checkpoint.storage import address
from tandem.checkpoint.storage.copies import Copies, local_folder
from tandem.checkpoint.store import CheckpointStore
from tandem.checkpoint.writer import CheckpointWriter
from tandem.config import DataConfig, EvaluationConfig, Settings
from tandem.data.source import Reader, training_data
from tandem.distributed import strategy as strategies
from tandem.distributed.group import Position, ProcessGroup, choose_device, first_line
from tandem.distributed.peers import is_peer_loss
from tandem.errors import FAILED, FINISHED, PEER_LOST, STOPPED, ConfigError, StoppedError, TandemError
from tandem.log import redirect_output, setup
from tandem.schedule import Cadence
from tandem.signals import StopFlag
from tandem.tasks.base import Task, load_task, task_class
from tandem.telemetry.clock import Clock
from tandem.telemetry.heartbeat import Heartbeats, dump_stacks_on_request
from tandem.telemetry.life import count_log_messages
from tandem.telemetry.messages import Send
from tandem.telemetry.recorder import Recorder
from tandem.training.evaluate import Evaluation
from tandem.training.loop import Timetable, Training, train
from tandem.training.nonfinite import Policy
from tandem.training.optim import Schedule, build_optimizer
from tandem.training.profiling import profiled
from tandem.training.replicas import check_replicas
from tandem.training.resume import COMPLETE, begin, load_state, load_weights
from tandem.training.saving import Saver, rank_zeros, snapshot_cadence
from tandem.training.seeding import seed_model
from tandem.training.step import Stepper
from tandem.training.summary import manifest_info, open_displays, write_summary

log = logging.getLogger("tandem.run")


def run_rank(settings_dict: dict[str, object], position: Position, send: Send | None = None) -> int:
    """Train as the rank at `position`; the exit code (see `errors`). Handlers are installed first thing.

    `send` takes messages for the metrics; under the agent they go to `position.sample_socket` instead.
    """
    started = time.monotonic()
    stop = StopFlag().install()
    settings = Settings.from_dict(settings_dict)
    run_dir = local_folder(str(settings.run.run_dir))
    try:
        _set_up_log(settings.telemetry.log_format, position, run_dir)
        dump_stacks_on_request(run_dir / "log", position.rank)
        send = send or _sender(position)
        if position.store is not None:  # without an agent, this process counts its messages already
            count_log_messages(send)
        return _run(settings, position, run_dir, stop, send, started)
    except TandemError as error:
        log.error("%s", error)
        return error.exit_code
    except Exception as error:
        if is_peer_loss(error, position.world_size):
            log.error("lost the other ranks: %s", first_line(error))
            return PEER_LOST
        log.error("the task failed: %s\n%s", first_line(error), traceback.format_exc().rstrip())
        return FAILED


def warm_up(settings_dict: dict[str, object]) -> None:
    """What a process that may become a rank does in advance: import the task and what ranks talk with."""
    settings = Settings.from_dict(settings_dict)
    task_class(settings.run.task)
    strategies.preload(settings.compute.strategy)
    from tandem.telemetry import channel  # noqa: F401


def _set_up_log(log_format: str, position: Position, run_dir: Path) -> None:
    path = run_dir / "log" / f"rank-{position.rank}.log"
    if position.rank != 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            redirect_output(path)
        except OSError:  # a worker needs no volume: without one its words go to the terminal
            setup(None, position.rank, position.node_rank, True, log_format == "json")
            return
        setup(None, position.rank, position.node_rank, True, log_format == "json")
    else:
        setup(path, 0, position.node_rank, True, log_format == "json")


def _sender(position: Position) -> Send:
    if position.sample_socket is None:
        return lambda message: None
    from tandem.telemetry.channel import Sender

    return Sender(Path(position.sample_socket)).send


def _run(
    settings: Settings, position: Position, run_dir: Path, stop: StopFlag, send: Send, started: float
) -> int:
    batch_size = settings.data.batch_size
    threads = set_threads(settings.compute.threads, position)
    device = choose_device(settings.compute.device, position.local_rank)
    clock = Clock(device)
    for handler in logging.getLogger("tandem").handlers:
        handler.addFilter(clock.stamp)
    Heartbeats(
        position.rank,
        clock,
        send,
        None if settings.reliability.hang_timeout == "auto" else float(settings.reliability.hang_timeout),
        settings.reliability.first_step_timeout,
        device.type == "cpu",
        run_dir / "log",
    )
    recorder = Recorder(position.rank, batch_size, send, clock, position.node_rank)
    store = CheckpointStore(address(str(settings.run.run_dir)) / "checkpoints")
    with clock.phase("rendezvous"):
        world = ProcessGroup.open(position, device, settings.reliability.first_step_timeout)
        world.check_same_settings(settings.common_fields())
    run, data_dir = settings.run, settings.data.data_dir
    task = load_task(run.task, run.task_fields, data_dir, settings.data.download)
    prepare: Callable[[], None] = getattr(task, "prepare", lambda: None)
    world.once_per_node(prepare)
    datasets = task.build_datasets()
    collate = getattr(task, "collate", None)
    reader = Reader(settings.data, settings.run.seed, world.rank, world.size, collate, device)
    data = training_data(datasets.train, reader, settings.run.steps)
    order = data.order
    planned = settings.run.steps or settings.run.epochs * order.steps_per_epoch
    strategy = strategies.load(settings.compute.strategy, world)
    seed_model(settings.run.seed)
    model = _place(task, task.build_model(), device)
    if settings.compute.sync_batchnorm:
        model = world.synchronise_batchnorm(model)
    rank_zero_tensors = rank_zeros(model)
    model = strategy.spread(model)
    optimizer = build_optimizer(settings.optimisation, task, model)
    schedule = Schedule(settings.optimisation, batch_size, task, optimizer, order.steps_per_epoch, planned)
    with clock.phase("resume"):
        beginning = begin(world, store, position, recorder)
        if beginning.step == COMPLETE:
            return _leave(world, recorder, FINISHED)
        if world.is_first:
            (run_dir / "summary.json").unlink(missing_ok=True)
        _check_division(batch_size, world, fresh=beginning.state is None)
        if beginning.state is not None:
            load_state(beginning.state, strategy, model, optimizer, schedule)
            data.load(beginning.state.get("data", {}))
            recorder.load(beginning.state.get("log", {}))
        elif settings.checkpoint.init_from is not None:
            load_weights(world, strategy, settings.checkpoint.init_from, model)
        if beginning.state is not None and hasattr(task, "after_resume"):
            task.after_resume(model)
    stepper = Stepper(
        world,
        strategy,
        settings.compute,
        settings.optimisation,
        batch_size,
        settings.run.seed,
        task,
        model,
        optimizer,
        clock,
    )
    if beginning.state is not None and "scaler" in beginning.state:
        stepper.scaler.load_state_dict(beginning.state["scaler"])

    saver = Saver(
        world,
        CheckpointWriter(
            store,
            Retention.of(settings.checkpoint),
            settings.checkpoint.checkpoint_failures_allowed,
            recorder.saved,
            lambda step: recorder.event("checkpoint_verified", step=step),
            Copies(str(settings.run.run_dir)).push,
        ),
        lambda: {
            **strategy.whole({"model": model.state_dict(), "optimizer": optimizer.state_dict()}),
            "schedule": schedule.state(),
            "scaler": stepper.scaler.state_dict(),
            "data": data.state(),
            "log": recorder.state(),
        },
        lambda step: manifest_info(settings, world, order, planned, step, threads, recorder.scores_at(step)),
        rank_zero_tensors,
        beginning.slot,
    )
    training = Training(
        world=world,
        stepper=stepper,
        schedule=schedule,
        timetable=Timetable(
            {
                "log": Cadence.parse(settings.telemetry.log_every),
                "eval": Cadence.parse(settings.evaluation.eval_every),
                "save": Cadence.parse(settings.checkpoint.checkpoint_every),
                "check": Cadence.parse(settings.reliability.replica_check_every),
                "snapshot": snapshot_cadence(settings.checkpoint.snapshot_every, world, strategy),
            },
            order.steps_per_epoch,
            planned,
        ),
        recorder=recorder,
        clock=clock,
        nonfinite=Policy(settings.optimisation.on_nonfinite, settings.compute.precision, recorder),
        stop=stop,
        batches=profiled(
            _told(data.steps(beginning.step, planned), recorder),
            settings.telemetry.profile if world.is_first else None,
            beginning.step,
            run_dir / "profile" / "rank-0.json",
        ),
        evaluate=Evaluation(
            world,
            strategy,
            task,
            model,
            datasets.evaluation,
            evaluation_batch_size(settings.evaluation, settings.data, world),
            settings.compute.precision,
            settings.data.workers,
        ).scores,
        check_replicas=lambda step: check_replicas(world, strategy, model, recorder, step),
        saver=saver,
        step=beginning.step,
    )
    open_displays(
        settings, world, run_dir, recorder, order, planned, beginning, model, datasets.train, threads
    )
    with saver:
        finished = train(training)
        clock.begin("drain")
    if world.is_first and not saver.kept(training.step, finished):
        raise StoppedError(f"stopped at step {training.step}, but the checkpoint could not be written")
    code = FINISHED if finished else STOPPED
    weights = strategy.whole(model.state_dict())
    if world.is_first:
        write_summary(
            run_dir, settings, position, recorder, order, weights, saver.last_step, beginning, code, started
        )
    return _leave(world, recorder, code)


def set_threads(wanted: Literal["auto"] | int, position: Position) -> int:
    """CPU threads of this rank: what `--threads` says, or the cores it can count on."""
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // position.ranks_on_host) if wanted == "auto" else int(wanted)
    torch.set_num_threads(threads)
    return threads


def evaluation_batch_size(config: EvaluationConfig, data: DataConfig, world: ProcessGroup) -> int:
    """Samples per rank and evaluation pass: what is set, else as many as in a training pass."""
    share = -(-data.batch_size // world.size)
    return config.eval_batch_size or min(data.micro_batch_size or share, share)


def _check_division(batch_size: int, world: ProcessGroup, fresh: bool) -> None:
    if fresh and batch_size % world.size:
        below = batch_size - batch_size % world.size
        raise ConfigError(
            f"--batch-size {batch_size} does not divide over {world.size} ranks; "
            f"use {below or world.size} or {below + world.size}"
        )


def _place(task: Task, model: nn.Module, device: torch.device) -> nn.Module:
    place = getattr(task, "place", None)
    placed = place(model, device) if place is not None else model.to(device)
    return placed if isinstance(placed, nn.Module) else model


def _told(steps: Iterator[list[Any]], recorder: Recorder) -> Iterator[list[Any]]:
    """`steps`; an error of the data, which ends the run, is counted."""
    try:
        yield from steps
    except Exception as error:
        recorder.data_error(type(error).__name__)
        raise


def _leave(world: ProcessGroup, recorder: Recorder, code: int) -> int:
    recorder.close()
    world.close()
    return code
