"""The composition root: the function that every rank runs, from an open process group to an exit code."""

import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tandem.checkpoint.storage import address
from tandem.checkpoint.storage.copies import local_folder
from tandem.checkpoint.store import CheckpointStore
from tandem.config import Settings
from tandem.data.datasets import Datasets
from tandem.data.source import Reader, TrainingData, training_data
from tandem.distributed import strategy as strategies
from tandem.distributed.group import Position, ProcessGroup, choose_device, first_line
from tandem.distributed.peers import is_peer_loss
from tandem.errors import FAILED, FINISHED, PEER_LOST, STOPPED, ConfigError, StoppedError, TandemError
from tandem.log import redirect_output, setup
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
from tandem.training.resume import COMPLETE, begin, load_weights
from tandem.training.saving import Saver, rank_zeros, snapshot_cadence
from tandem.training.seeding import seed_model
from tandem.training.state import TrainingState
from tandem.training.step import Stepper
from tandem.training.summary import Facts, open_displays, write_summary

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
    """From the process group to the summary; what is put together here builds itself."""
    threads = set_threads(settings.compute.threads, position)
    device = choose_device(settings.compute.device, position.local_rank)
    clock = _clock(settings, position, device, send, run_dir)
    recorder = Recorder(position.rank, settings.data.batch_size, send, clock, position.node_rank)
    with clock.phase("rendezvous"):
        world = ProcessGroup.open(position, device, settings.reliability.first_step_timeout)
        world.check_same_settings(settings.common_fields())
    task, datasets = _task(settings, world)
    reader = Reader(
        settings.data, settings.run.seed, world.rank, world.size, getattr(task, "collate", None), device
    )
    data = training_data(datasets.train, reader, settings.run.steps)
    order = data.order
    planned = settings.run.steps or settings.run.epochs * order.steps_per_epoch
    strategy = strategies.load(settings.compute.strategy, world)
    model = _model(settings, task, world)
    rank_zero_tensors = rank_zeros(model)  # before a strategy makes them other tensors
    model = strategy.spread(model)
    optimizer = build_optimizer(settings.optimisation, task, model)
    schedule = Schedule(
        settings.optimisation, settings.data.batch_size, task, optimizer, order.steps_per_epoch, planned
    )
    stepper = Stepper(world, strategy, settings, task, model, optimizer, clock)
    state = TrainingState(strategy, model, optimizer, schedule, stepper.scaler, data, recorder)
    store = CheckpointStore(address(str(settings.run.run_dir)) / "checkpoints")
    with clock.phase("resume"):
        beginning = begin(world, store, position, recorder)
        if beginning.step == COMPLETE:
            return _leave(world, recorder, FINISHED)
        if world.is_first:
            (run_dir / "summary.json").unlink(missing_ok=True)
        _check_division(settings.data.batch_size, world, fresh=beginning.state is None)
        if beginning.state is not None:
            state.load(beginning.state)
            getattr(task, "after_resume", _nothing)(model)
        elif settings.checkpoint.init_from is not None:
            load_weights(world, strategy, settings.checkpoint.init_from, model)
    facts = Facts(settings, world, run_dir, order, planned, threads, beginning.step, started)
    saver = Saver(facts, store, state, recorder, rank_zero_tensors, beginning.slot)
    snapshots = snapshot_cadence(settings.checkpoint.snapshot_every, world, strategy)
    training = Training(
        world=world,
        stepper=stepper,
        schedule=schedule,
        timetable=Timetable.of(settings, snapshots, order.steps_per_epoch, planned),
        recorder=recorder,
        clock=clock,
        nonfinite=Policy(settings.optimisation.on_nonfinite, settings.compute.precision, recorder),
        stop=stop,
        batches=_batches(settings, data, facts, recorder),
        evaluate=Evaluation.of(settings, world, strategy, task, model, datasets.evaluation).scores,
        check_replicas=partial(check_replicas, world, strategy, model, recorder),
        saver=saver,
        step=beginning.step,
    )
    open_displays(facts, recorder, model)
    with saver:
        finished = train(training)
        clock.begin("drain")
    if world.is_first and not saver.kept(training.step, finished):
        raise StoppedError(f"stopped at step {training.step}, but the checkpoint could not be written")
    code = FINISHED if finished else STOPPED
    weights = state.weights()
    if world.is_first:
        write_summary(facts, recorder, weights, saver.last_step, code)
    return _leave(world, recorder, code)


def _clock(settings: Settings, position: Position, device: torch.device, send: Send, run_dir: Path) -> Clock:
    """The clock of phases, with who reads it beside the training: lines of the log, and the heartbeat."""
    clock, limits = Clock(device), settings.reliability
    for handler in logging.getLogger("tandem").handlers:
        handler.addFilter(clock.stamp)
    hang_timeout = None if limits.hang_timeout == "auto" else float(limits.hang_timeout)
    on_cpu, folder = device.type == "cpu", run_dir / "log"
    Heartbeats(position.rank, clock, send, hang_timeout, limits.first_step_timeout, on_cpu, folder)
    return clock


def _task(settings: Settings, world: ProcessGroup) -> tuple[Task, Datasets]:
    """The task, prepared once on each node, and its datasets."""
    run, data = settings.run, settings.data
    task = load_task(run.task, run.task_fields, data.data_dir, data.download)
    prepare: Callable[[], None] = getattr(task, "prepare", _nothing)
    world.once_per_node(prepare)
    return task, task.build_datasets()


def _model(settings: Settings, task: Task, world: ProcessGroup) -> nn.Module:
    """The task's model on its device, with the same initial weights on every rank."""
    seed_model(settings.run.seed)
    model = _place(task, task.build_model(), world.device)
    return world.synchronise_batchnorm(model) if settings.compute.sync_batchnorm else model


def _batches(settings: Settings, data: TrainingData, facts: Facts, recorder: Recorder) -> Iterator[list[Any]]:
    """The micro-batches of each step from here to the planned end; rank 0 may record some for --profile."""
    steps = _told(data.steps(facts.first_step, facts.planned), recorder)
    window = settings.telemetry.profile if facts.world.is_first else None
    return profiled(steps, window, facts.first_step, facts.run_dir / "profile" / "rank-0.json")


def _nothing(*_: object) -> None:
    """In place of a method that a task does not have."""


def set_threads(wanted: Literal["auto"] | int, position: Position) -> int:
    """CPU threads of this rank: what `--threads` says, or the cores it can count on."""
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // position.ranks_on_host) if wanted == "auto" else int(wanted)
    torch.set_num_threads(threads)
    return threads


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
