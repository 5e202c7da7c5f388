"""The function that every rank of a task runs: build the model and data, train, and return the exit code."""

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

from tandem import layout
from tandem.code_files import write_code
from tandem.config import Settings, TaskJob
from tandem.data.loader import end_loaders, loader_processes
from tandem.data.seeds import seed_model
from tandem.distributed import strategy as strategies
from tandem.distributed.child_processes import killed_child, stop_child_news
from tandem.distributed.devices import cores_of, not_deterministic, open_gpus
from tandem.distributed.peers import is_gpu_failure, is_peer_loss
from tandem.distributed.position import RankStart
from tandem.distributed.whole_state import broadcast_state
from tandem.errors import (
    FAILED,
    FINISHED,
    GPU_FAILED,
    PEER_LOST,
    STOPPED,
    ConfigError,
    PeerLostError,
    SmallerBatchError,
    TandemError,
    WrongNodeError,
)
from tandem.log import log_if_slow
from tandem.rank.restarts import OutOfMemoryHandler, WrongNodeHandler, check_products
from tandem.rank.session import RankSession
from tandem.signals import StopFlag
from tandem.tasks.base import TaskWithDefaults, load_task, task_class
from tandem.tasks.build import datasets_of, model_of
from tandem.tasks.traces import full_trace, short_trace, what_and_where
from tandem.telemetry.messages import Event
from tandem.telemetry.recorder import Recorder
from tandem.text import in_one_line
from tandem.timeouts import CODE_RECORD_SECONDS
from tandem.training.evaluate import Evaluation, evaluation_batch_size
from tandem.training.flops import profiled
from tandem.training.loop import TaskLoopState, repeat_evaluation, train
from tandem.training.precision import precision_of
from tandem.training.rank_checks import ReplayCheck, check_replicas, lengthen
from tandem.training.resume import COMPLETE
from tandem.training.saving import warn_of_unsaved_scores
from tandem.training.shards import ShardedReading, check_shared
from tandem.training.train_state import TrainState, check_model, recall
from tandem.training.weights import load_saved, tensors_in

log = logging.getLogger("tandem.run")

# Implement `tandem eval`: score a checkpoint as a run with any number of ranks would have done.


def score(settings: Settings, start: RankStart, source: str) -> dict[str, float]:
    """Return the scores of the weights at `source` over the task's evaluation set; all ranks call this.

    Rank 0 reads the checkpoint. Raises ConfigError for another model, and without an evaluation set.
    """
    data = settings.data
    session = RankSession(settings, start)
    session.open_group()
    world = session.world
    task = TaskWithDefaults(
        load_task(settings.run.task, settings.run.task_fields, data.data_dir, data.download)
    )
    world.once_per_node(task.prepare)
    dataset = datasets_of(task, settings.run.seed).evaluation
    if dataset is None:
        raise ConfigError(f"task {settings.run.task} has no evaluation set; return one in its Datasets")
    seed_model(settings.run.seed)
    strategy = strategies.load_to_evaluate(settings.compute.strategy, world)
    model = strategy.shard(strategy.build(lambda: model_of(task, world.devices)))
    # A run that is still training may save a newer checkpoint at any time, so one rank chooses for all.
    saved = load_saved(source) if world.is_first else None
    state = broadcast_state(world, saved.state if saved else None, {})
    task.moment.resume(*world.broadcast_json([saved.step, saved.epoch_steps] if saved else None))
    weights = tensors_in(state)
    check_model(model, weights)
    strategy.load_model(model, weights)
    recall(task, state)
    task.after_resume(model)
    size = evaluation_batch_size(settings.evaluation, data, world)
    precision = precision_of(settings.compute.precision, world)
    workers = loader_processes(data.workers, cores_of(session.position))
    scores = Evaluation(world, strategy, task, model, dataset, size, precision, workers).scores()
    session.close()
    return scores


def run_rank(
    job: TaskJob, start: RankStart, watch_stop_flag: Callable[[StopFlag], None] = lambda stop: None
) -> int:
    """Train as the rank that `start` describes, and return the exit code (see `errors`).

    Signal handlers are installed first. `watch_stop_flag`, without an agent, receives the stop flag.
    """
    stop = StopFlag().install()
    # Without an agent, launch/standalone_rank.py reacts to signals from here on. The start below may wait
    # long for data or for other ranks.
    watch_stop_flag(stop)
    session = RankSession(Settings.from_dict(job.settings), start)
    position = session.position
    try:
        session.open_log()
        with session:
            _run(session, job.chosen, stop)
        return session.code
    except (SmallerBatchError, WrongNodeError) as error:
        stop_child_news()
        end_loaders()
        log.info("%s", error, extra={"detail": in_one_line(error.__cause__ or error)})  # its agent warns
        return error.exit_code
    except TandemError as error:
        stop_child_news()
        # Loader processes ignore stop signals, so the rank ends them.
        end_loaders()
        log.error("%s", error)
        _tell(session, error)
        return error.exit_code
    except Exception as error:
        # Do this first, because torch's SIGCHLD handler could raise in any line below. The call removes it.
        killed = killed_child(error)
        end_loaders()  # while the traceback still refers to them: dropping it would wait for them
        # A failed GPU also breaks collectives, so its error may look like that of a lost peer.
        if is_gpu_failure(error):
            log.error("this rank's GPU failed (a new process may recover it): %s", in_one_line(error))
            return GPU_FAILED
        if is_peer_loss(error, position.world_size):
            has_agent = session.connection.store is not None  # which restarts it
            level = logging.WARNING if has_agent else logging.ERROR
            log.log(level, "lost the other ranks", extra={"detail": in_one_line(error)})
            return PEER_LOST
        if killed is not None:
            log.error("%s: the rank exits as if it had been killed, and will be restarted", killed[0])
            return killed[1]
        if (refused := not_deterministic(error)) is not None:
            log.error("%s", refused)
            _tell(session, refused)
            return refused.exit_code
        _tell(session, error)
        log.info(
            "the full traceback is in log/rank-%d.log", position.rank, extra={"detail": full_trace(error)}
        )
        log.error("%s\nthe task failed: %s", short_trace(error), _what(session, error))
        return FAILED


def _what(session: RankSession, error: Exception) -> str:
    """Return on one line why this rank failed, with a remedy if one is known."""
    what = str(error) if isinstance(error, TandemError) else what_and_where(error)
    return f"{what}; {session.advice}" if session.advice else what


def _tell(session: RankSession, error: Exception) -> None:
    """Send the reason for this rank's failure to its agent, which reports it last and to the other nodes."""
    # The rank that caused the loss reports the reason; its peers only know that it is gone.
    if not isinstance(error, PeerLostError):
        rank = session.position.rank
        node = session.position.node_rank
        reason = f"rank {rank} on node {node}: {_what(session, error)}"
        # Errors of torch can be longer than the 64 KiB that fit in a message.
        session.send(Event("rank_failed", time.time(), {"rank": rank, "reason": reason[:1000]}))


def warm_up(job: TaskJob, expected: RankStart | None = None) -> None:
    """Prepare a process that may become a rank: import the task, and open its GPU if --warm-gpu is set."""
    settings = Settings.from_dict(job.settings)
    task_class(settings.run.task)
    strategies.preload(settings.compute.strategy)
    if settings.launch.warm_gpu and expected is not None:
        open_gpus(settings.compute, expected.position.gpu)


def _run(session: RankSession, chosen: frozenset[str], stop: StopFlag) -> None:
    """Build the model and data, load the state, train, and set the session's exit code."""
    world = session.world
    clock = session.clock
    settings = session.settings
    # The agent tells only rank 0.
    micro_batch = world.broadcast_json(session.grant.resume.micro_batch)
    data = settings.data if micro_batch is None else replace(settings.data, micro_batch_size=micro_batch)
    slices = settings.run, data, settings.compute, settings.optimization, settings.exchange
    with log_if_slow("building data and model"):
        train_state = TrainState(*slices, world, clock, session.recorder, chosen)
    train_state.train_step.is_restarted = session.grant.restart > 0
    destinations = train_state.model.state_dict()
    shards = None
    if train_state.strategy.shards_parameters:
        check_shared(world, session.run.where)
        shards = ShardedReading(world, train_state.strategy.rows)
    with clock.phase("resume"), log_if_slow("deciding where to resume"):
        if session.resume(destinations=destinations, shards=shards).step == COMPLETE:
            session.recorder.close()
            return
        # The state that is loaded next has a position in these samples.
        session.check_data(train_state.datasets.train, train_state.order)
        train_state.begin(session.resume_point)
        train_state.check_state()
    _plan(session, train_state, micro_batch)
    evaluation = Evaluation(
        world,
        train_state.strategy,
        train_state.task,
        train_state.model,
        train_state.datasets.evaluation,
        evaluation_batch_size(settings.evaluation, data, world),
        settings.compute.precision,
        train_state.workers,
        train_state.exchanges,
    )
    event_schedule = session.event_schedule
    saver = session.saver
    # A restart of the same launch has already tested it. The test's findings are in the state, if there is
    # one.
    is_tested = session.grant.restart > 0 and session.resume_point.step > 0
    if not is_tested and event_schedule.cadences["eval"].unit != "never":
        with log_if_slow("testing the evaluation"):
            evaluation.dry_run()
    wrong_node = WrongNodeHandler(session)
    handler = OutOfMemoryHandler(session, data, train_state.shares, train_state.model)
    training = _training(session, train_state, partial(handler.scores, evaluation.scores), stop)
    session.begin_run(train_state.model)
    if session.position.local_rank == 0 and session.grant.sample_socket:
        # For the agent, which compares the files at a restart. Later, so that no recovery waits for it.
        record = threading.Timer(CODE_RECORD_SECONDS, write_code, [session.grant.imports_file])
        record.daemon = True
        record.start()
    resume_point = session.resume_point
    planned = train_state.planned
    first = f"running the first steps (--log-every {settings.telemetry.log_every})"
    with wrong_node.watching(), saver, log_if_slow(first) if world.is_first else nullcontext():
        # After the task has ended a run, another --steps or --epochs continues it.
        saver.is_end = resume_point.ended_of == planned
        if world.size > 1:
            check_products(session)
        with handler.watching():
            if resume_point.owes_evaluation:
                repeat_evaluation(training)
            with closing(cast("Generator[Any, None, None]", training.batches)):  # ends an open profile
                finished = saver.is_end or train(training)
        if resume_point.is_from_memory and resume_point.step == planned:
            saver.save(training.step)  # no step was left to take, and the state exists only in memory
        clock.begin("drain")
    session.code = FINISHED if finished else STOPPED
    session.finish(training.step, train_state.weights, train_state.schedule.used())


def _plan(session: RankSession, train_state: TrainState, micro_batch: int | None) -> None:
    """Plan the run, and log events that are never due."""
    settings = session.settings
    is_first = session.world.is_first
    evaluates = train_state.datasets.evaluation is not None
    if is_first and not evaluates:
        log.info("no evaluation: the task has only a training dataset")
    eval_every = settings.evaluation.eval_every if evaluates else "never"
    session.plan(
        train_state,
        train_state.strategy,
        train_state.order,
        train_state.planned,
        eval_every,
        train_state.shares,
        micro_batch=micro_batch,
    )
    if is_first and not session.event_schedule.saves_every_evaluation():
        warn_of_unsaved_scores(settings.checkpoint, settings.evaluation.eval_every)


def _training(
    session: RankSession, train_state: TrainState, evaluate: Callable[[], dict[str, float]], stop: StopFlag
) -> TaskLoopState:
    """Assemble the loop. Rank 0's steps of --profile are recorded by torch.profiler."""
    world = session.world
    recorder = session.recorder
    first = session.resume_point.step
    window = session.settings.telemetry.profile if world.is_first else None
    replay = _replay_check(session, train_state)
    steps = _counting_errors(train_state.data.steps(first, train_state.planned), recorder)
    profile = session.run.folder / layout.PROFILE / layout.profile(0)
    return TaskLoopState(
        world=world,
        task=train_state.task,
        model=train_state.model,
        train_step=train_state.train_step,
        schedule=train_state.schedule,
        event_schedule=session.event_schedule,
        recorder=recorder,
        clock=session.clock,
        nonfinite=train_state.nonfinite,
        stop=stop,
        batches=profiled(steps, window, first, profile),
        evaluate=evaluate,
        ends=train_state.task_state.after_evaluation,
        check_replicas=partial(check_replicas, world, train_state.strategy, train_state.model, recorder),
        saver=session.saver,
        step=first,
        check_next_step=replay.check_next_step if replay is not None else lambda: None,
    )


def _replay_check(session: RankSession, train_state: TrainState) -> ReplayCheck | None:
    """Return the check of --replay-check, or None. Raises ConfigError if it cannot be right."""
    every = session.settings.reliability.replay_check
    if every == "never":
        return None
    check = train_state.train_step.repeat_on_others(session.settings.compute, session.recorder)
    if every == "auto":
        check.on_cost = partial(lengthen, session.event_schedule.cadences)
    return check


def _counting_errors(steps: Iterator[list[Any]], recorder: Recorder) -> Iterator[list[Any]]:
    """Yield `steps`; count an error of the data, which ends the run."""
    try:
        yield from steps
    except Exception as error:
        recorder.data_error(type(error).__name__)
        raise
