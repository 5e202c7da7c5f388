"""The composition root: the function that every rank runs, from the process group to the exit code."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from tandem import layout
from tandem.config import Settings, TaskJob
from tandem.data.fingerprint import data_facts
from tandem.data.loader import end_loaders
from tandem.distributed import strategy as strategies
from tandem.distributed.devices import not_deterministic, open_gpus
from tandem.distributed.gpu_failures import is_gpu_failure
from tandem.distributed.group import Position, ProcessGroup, in_one_line
from tandem.distributed.helpers import killed_helper
from tandem.distributed.peers import is_peer_loss
from tandem.errors import (
    FAILED,
    FINISHED,
    GPU_FAILED,
    PEER_LOST,
    STOPPED,
    PeerLostError,
    TandemError,
)
from tandem.log import reporting
from tandem.run.directory import RunDir
from tandem.signals import StopFlag
from tandem.silence import still
from tandem.tasks.base import task_class
from tandem.tasks.traces import full_trace, short_trace, what_and_where
from tandem.telemetry.channel import sender
from tandem.telemetry.life import count_log_messages
from tandem.telemetry.messages import Event, Send
from tandem.telemetry.recorder import Recorder
from tandem.telemetry.stacks import keep_stacks
from tandem.training.evaluate import Evaluation, evaluation_batch_size
from tandem.training.learner import Learner
from tandem.training.loop import Timetable, Training, make_up, train
from tandem.training.opening import open_world, set_up_log
from tandem.training.precision import precision_of
from tandem.training.profiling import profiled
from tandem.training.replicas import check_replicas
from tandem.training.resume import COMPLETE, begin, check_data
from tandem.training.saving import Saver, snapshot_every, warn_of_unsaved_scores
from tandem.training.summary import Facts, forget_summary, open_displays, write_summary

log = logging.getLogger("tandem.run")


def run_rank(
    job: TaskJob,
    position: Position,
    send: Send | None = None,
    hear: Callable[[StopFlag], None] = lambda stop: None,
) -> int:
    """Train as the rank at `position`, and return the exit code (see `errors`).

    Signal handlers are installed first. `send` takes messages for the metrics; under an agent they go to
    `position.sample_socket` instead. `hear`, without an agent, receives the stop flag.
    """
    started = time.monotonic()
    stop = StopFlag().install()
    hear(stop)
    settings = Settings.from_dict(job.settings)
    run = RunDir.of(settings, position.owner)
    try:
        set_up_log(settings.telemetry.log_format, position, run)
        keep_stacks(run.logs, position.rank)
        send = send or sender(position.sample_socket)
        if position.store is not None:  # without an agent, this process counts its own messages
            count_log_messages(send)
        return _run(settings, job.chosen, position, run, stop, send, started)
    except TandemError as error:
        end_loaders()
        log.error("%s", error)
        _tell(send, position, error)
        return error.exit_code
    except Exception as error:
        killed = killed_helper(error)
        end_loaders()  # while the traceback still holds them: dropping it would wait for them
        if is_gpu_failure(error):
            log.error("this rank's GPU failed (a new process may recover it): %s", in_one_line(error))
            return GPU_FAILED
        if is_peer_loss(error, position.world_size):
            level = logging.ERROR if position.store is None else logging.WARNING  # an agent restarts it
            log.log(level, "lost the other ranks", extra={"detail": in_one_line(error)})
            return PEER_LOST
        if killed is not None:
            log.error("%s: the rank exits as if it had been killed, and will be restarted", killed[0])
            return killed[1]
        if (refused := not_deterministic(error)) is not None:
            log.error("%s", refused)
            _tell(send, position, refused)
            return refused.exit_code
        _tell(send, position, error)
        log.info(
            "the full traceback is in log/rank-%d.log", position.rank, extra={"detail": full_trace(error)}
        )
        log.error("%s\nthe task failed: %s", short_trace(error), what_and_where(error))
        return FAILED


def _tell(send: Send | None, position: Position, error: Exception) -> None:
    """Send the reason of this rank's failure to its agent, which reports it last and to the other nodes."""
    if send is not None and not isinstance(error, PeerLostError):
        what = str(error) if isinstance(error, TandemError) else what_and_where(error)
        reason = f"rank {position.rank} on node {position.node_rank}: {what}"
        send(Event("rank_failed", time.time(), {"rank": position.rank, "reason": reason[:1000]}))


def warm_up(job: TaskJob, expected: Position | None = None) -> None:
    """Prepare a process that may become a rank: import the task, and open its GPU if --warm-gpu is set."""
    settings = Settings.from_dict(job.settings)
    task_class(settings.run.task)
    strategies.preload(settings.compute.strategy)
    if settings.launch.warm_gpu and expected is not None:
        open_gpus(settings.compute, expected.gpu)


def _run(
    settings: Settings,
    chosen: frozenset[str],
    position: Position,
    run: RunDir,
    stop: StopFlag,
    send: Send,
    started: float,
) -> int:
    """Run everything from the process group to the summary; each part builds itself."""
    clock, world, threads = open_world(
        settings.compute, settings.reliability, settings.common_fields(), position, send, run.logs
    )
    given, settings = settings, settings.replace(precision=precision_of(settings.compute.precision, world))
    recorder = Recorder(position.rank, settings.data.batch_size, send, clock, position.node_rank)
    slices = settings.run, settings.data, settings.compute, settings.optimization, settings.exchange
    with still("building data and model"):
        learner = Learner(*slices, world, clock, recorder, chosen)
    with clock.phase("resume"), still("deciding where to resume"):
        homes, download = learner.model.state_dict(), settings.data.download
        beginning = begin(world, run.checkpoints, settings.checkpoint, position, recorder, download, homes)
        if beginning.step == COMPLETE:
            return _leave(world, recorder, FINISHED)
        if world.is_first:
            forget_summary(run)
        data = data_facts(learner.datasets.train) if world.is_first else {}
        check_data(world, beginning, data, settings.checkpoint.on_data_change)
        learner.begin(beginning)
        learner.check_state()
        beginning = replace(beginning, state=None)  # the model and the optimizer have it now
    timetable = _timetable(settings, learner, world)
    evaluation = _evaluation(settings, learner, world)
    # A restart of the same launch has tested it before.
    if position.restart == 0 and timetable.cadences["eval"].unit != "never":
        with still("testing the evaluation"):
            evaluation.rehearse()
    facts = Facts(
        run=settings.run,
        batch_size=settings.data.batch_size,
        precision=settings.compute.precision,
        settings=given.to_dict(),
        fingerprint=given.fingerprint_fields(),
        config_hash=given.digest(),
        world=world,
        directory=run,
        order=learner.order,
        planned=learner.planned,
        threads=threads,
        first_step=beginning.step,
        started=started,
        shares=learner.shares,
        data=data,
    )
    saver = Saver(settings.checkpoint, facts, learner, recorder, beginning.slot)
    window = settings.telemetry.profile if world.is_first else None
    training = _training(learner, timetable, evaluation, saver, facts, stop, window)
    open_displays(facts, settings.telemetry, timetable.steps_between("save"), recorder, learner.model)
    first = f"running the first steps (--log-every {settings.telemetry.log_every})"
    with saver, still(first) if world.is_first else nullcontext():
        saver.is_end = beginning.ended_of == learner.planned
        if beginning.owes_evaluation:
            make_up(training)
        finished = saver.is_end or train(training)
        if beginning.slot is not None and beginning.step == learner.planned:
            saver.save(training.step)  # there was no step left to take, and the state exists only in memory
        clock.begin("drain")
    return _end(training, facts, learner, finished)


def _timetable(settings: Settings, learner: Learner, world: ProcessGroup) -> Timetable:
    """Return when each event is due, and log those that never are."""
    evaluates = learner.datasets.evaluation is not None
    if world.is_first and not evaluates:
        log.info("no evaluation: the task has only a training dataset")
    timetable = Timetable.of(
        learner.order.steps_per_epoch,
        learner.planned,
        log=settings.telemetry.log_every,
        eval=settings.evaluation.eval_every if evaluates else "never",
        save=settings.checkpoint.checkpoint_every,
        check=settings.reliability.replica_check_every,
        snapshot=snapshot_every(settings.checkpoint.snapshot_every, world, learner.strategy),
    )
    if world.is_first and not timetable.saves_every_evaluation():
        warn_of_unsaved_scores(settings.checkpoint, settings.evaluation.eval_every)
    return timetable


def _evaluation(settings: Settings, learner: Learner, world: ProcessGroup) -> Evaluation:
    return Evaluation(
        world,
        learner.strategy,
        learner.task,
        learner.model,
        learner.datasets.evaluation,
        evaluation_batch_size(settings.evaluation, settings.data, world),
        settings.compute.precision,
        learner.workers,
        learner.exchanges,
    )


def _training(
    learner: Learner,
    timetable: Timetable,
    evaluation: Evaluation,
    saver: Saver,
    facts: Facts,
    stop: StopFlag,
    window: str | None,
) -> Training:
    """Assemble the loop. `window` is recorded by torch.profiler."""
    world, recorder = facts.world, learner.recorder
    steps = _told(learner.data.steps(facts.first_step, learner.planned), recorder)
    profile = facts.directory.folder / layout.PROFILE / layout.profile(0)
    return Training(
        world=world,
        task=learner.task,
        model=learner.model,
        stepper=learner.stepper,
        schedule=learner.schedule,
        timetable=timetable,
        recorder=recorder,
        clock=learner.stepper.clock,
        nonfinite=learner.nonfinite,
        stop=stop,
        batches=profiled(steps, window, facts.first_step, profile),
        evaluate=evaluation.scores,
        ends=learner.memory.hear,
        check_replicas=partial(check_replicas, world, learner.strategy, learner.model, recorder),
        saver=saver,
        step=facts.first_step,
    )


def _end(training: Training, facts: Facts, learner: Learner, finished: bool) -> int:
    """Write the summary, and return the exit code. Raises as `Saver.end`."""
    world, saver, recorder = training.world, training.saver, training.recorder
    if world.is_first:
        saver.end(training.step, finished)
    code = FINISHED if finished else STOPPED
    weights = learner.weights()
    if world.is_first:
        used, ended_early = learner.schedule.used(), finished and saver.is_end
        write_summary(facts, recorder, weights, saver.last_step, code, ended_early, used)
    return _leave(world, recorder, code)


def _told(steps: Iterator[list[Any]], recorder: Recorder) -> Iterator[list[Any]]:
    """Yield `steps`; count an error of the data, which ends the run."""
    try:
        yield from steps
    except Exception as error:
        recorder.data_error(type(error).__name__)
        raise


def _leave(world: ProcessGroup, recorder: Recorder, code: int) -> int:
    with reporting("close the displays"):
        recorder.close()
    world.close()
    return code
