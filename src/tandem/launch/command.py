"""Implement `tandem launch` and `tandem train`, from parsed flags to the process's exit code."""

import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from tandem.config import Given, Settings, as_flags, resolve
from tandem.config.task_names import parsed, untyped_task_note
from tandem.errors import ConfigError, TandemError
from tandem.json_output import wrap_stderr
from tandem.launch.announce_error import write_termination_message
from tandem.launch.node import run_this_node, with_port
from tandem.launch.program_arguments import check, hint, without_effect
from tandem.launch.run_dir import adjust_for_job
from tandem.launch.secret import conceal
from tandem.launch.simulated import simulate
from tandem.launch.this_machine import check_loopback, gpus_of, share_of_replica
from tandem.launch.torch_variables import wait_passively
from tandem.log import is_quiet, log_if_slow, setup, survive_closed_terminal, writes_to_file
from tandem.platforms.compose import note_end, note_start, permanent_exit_code
from tandem.platforms.detection import Placement, detect_here
from tandem.process import without_collection
from tandem.run.directory import RunDir
from tandem.run.lease import refuse_if_owned
from tandem.script.job import Program
from tandem.signals import StopFlag
from tandem.text import relative_path
from tandem.work.base import Workload

log = logging.getLogger("tandem.launch")

Flags = Mapping[str, Given]
Environment = Mapping[str, str]


def launch(flags: Flags, environ: Environment, program: Program | None = None) -> int:
    """Run this node's agent, or all simulated nodes of a laptop, and return the exit code.

    Trains the task of the settings, or runs `program`. Raises TandemError.
    """
    survive_closed_terminal()
    try:
        if program is not None:
            check(program, flags)
        if not environ.get("TANDEM_COMPOSE_PROJECT"):
            return _launch(flags, environ, program)
        return _launch_replica(flags, environ, program)
    except TandemError as error:
        write_termination_message(str(error))
        raise


def _launch_replica(flags: Flags, environ: Environment, program: Program | None) -> int:
    """Run under Compose, which restarts on any nonzero exit: exit at once if the last end was permanent."""
    run_dir = RunDir(environ.get("TANDEM_RUN_DIR", ".")).folder
    container = socket.gethostname()
    code = permanent_exit_code(run_dir, container)
    if code is not None:
        return code
    note_start(container)
    try:
        code = _launch(flags, environ, program)
    except TandemError as error:
        note_end(run_dir, container, error.exit_code)
        raise
    note_end(run_dir, container, code)
    return code


def _launch(flags: Flags, environ: Environment, program: Program | None) -> int:
    stop = StopFlag().install()
    run, settings, placement, chosen = _begin(flags, environ, program)
    if placement.rank is not None and program is None:
        # The platform has started a process for each rank, so an agent would have no ranks to start.
        return _train(run, settings, placement, chosen)
    work = _workload_of(program, run, settings, chosen)
    work.check(placement, lambda: gpus_of(environ))
    if placement.starts_all:
        refuse_if_owned(run.where)  # fail early; node 0 takes the lease only once it has started
    if placement.node_rank == 0:
        check_loopback()
    # Reserve the port here, so that all simulated nodes get the same one.
    placement = with_port(placement)
    if placement.starts_all and placement.nodes > 1:
        words = [*as_flags(flags), *_notify_flag(settings)]
        return simulate(run, settings, placement, words, environ, stop, work)
    if program is not None and placement.node_rank == 0 and (unread := without_effect(program, flags)):
        log.warning("%s", unread)
    started = placement.nodes + placement.spares
    if per_node := environ.get("TANDEM_COMPOSE_GPUS"):
        os.environ.update(share_of_replica(gpus_of(environ), per_node, placement.node_rank, started))
    is_here = placement.node_rank == 0 and (placement.starts_all or placement.nodes_share_host)
    is_shown = is_here and settings.telemetry.log_format != "json" and not is_quiet()
    header = where(run, work.saves) if is_shown else ""
    state = environ.get("TANDEM_STATE_DIR")
    return run_this_node(run, settings, placement, work, Path(state) if state else None, stop, header)


def _notify_flag(settings: Settings) -> list[str]:
    """Return the flag that gives the webhook to simulated nodes, which no longer find it in a variable."""
    webhook = settings.telemetry.notify
    return ["--notify", webhook.address] if webhook is not None and webhook.address else []


def _workload_of(
    program: Program | None, run: RunDir, settings: Settings, chosen: frozenset[str]
) -> Workload:
    """Import only what this kind needs: a program runs without tasks, data and training."""
    if program is not None:
        from tandem.work.program import ProgramWorkload

        return ProgramWorkload(program, run, settings, chosen, partial(hint, program))
    from tandem.work.task import TaskWorkload

    return TaskWorkload(run, settings, chosen)


def train(flags: Flags, environ: Environment) -> int:
    """Run a single rank, at the position that the environment gives, or alone; return the exit code.

    Raises TandemError.
    """
    survive_closed_terminal()
    run, settings, placement, chosen = _begin(flags, environ)
    placement = placement.as_rank()
    if placement.rank is None and placement.nodes > 1:
        raise ConfigError(
            f"`tandem train` runs one rank, but its place among {placement.nodes} nodes is not set; "
            f"start all ranks with `tandem launch --nodes {placement.nodes}` or torchrun"
        )
    return _train(run, settings, placement, chosen)


def _train(run: RunDir, settings: Settings, placement: Placement, chosen: frozenset[str]) -> int:
    if settings.telemetry.notify is not None and not placement.rank:
        log.warning("--notify has no effect here: an agent sends the messages; start with `tandem launch`")
    wait_passively()
    with log_if_slow("importing torch"), without_collection():
        from tandem.launch.standalone_rank import run_standalone_rank
        from tandem.work.task import rank_function

        function = rank_function()
    return run_standalone_rank(run, settings, placement, function, chosen)


def _begin(
    flags: Flags, environ: Environment, program: Program | None = None
) -> tuple[RunDir, Settings, Placement, frozenset[str]]:
    """Return the run directory, the settings, this node's placement, and the names of explicit settings."""
    loaded = resolve(flags, environ)
    settings = loaded.settings
    # Set the variables first, because every process that is started later inherits them.
    conceal(settings.telemetry.notify, os.environ, sys.argv)
    notes = list(loaded.notes)
    if program is not None:
        settings = settings.replace(task=program.name, task_fields={})
    else:
        parsed(settings.run.task)  # reports a misspelled name before torch is imported
        notes += filter(None, [untyped_task_note(loaded)])
    placement = detect_here(environ, settings.launch)
    setup(None, None, placement.node_rank, True, settings.telemetry.log_format == "json")
    is_simulated = placement.nodes_share_host and not placement.starts_all
    if settings.telemetry.log_format == "json" and not writes_to_file():
        wrap_stderr(placement.node_rank)
    # A simulated node's launcher has logged them.
    if not (placement.node_rank or placement.rank or is_simulated):
        for note in notes:
            log.info("%s", note)
        for name in sorted(loaded.chosen):
            log.debug("setting %s, from %s", name, loaded.sources[name])
    run = RunDir.open(settings, placement, time.time())
    settings = adjust_for_job(run, run.recorded(settings), placement)
    return run, settings, placement, loaded.chosen


def where(run: RunDir, saves: bool) -> str:
    """Return the lines that say where the run's files are.

    `saves` is False for a script, which saves its checkpoints anywhere, so they are not listed.
    """
    run_dir = relative_path(run.where)
    logs = run_dir if run.is_here else run.folder
    checkpoints = f"checkpoints  {run_dir}/checkpoints\n" if saves else ""
    return f"run          {run_dir}\n{checkpoints}logs         {logs}/log"
