"""Run one rank without an agent: under torchrun, srun or mpirun, started by hand, or alone."""

import contextlib
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from functools import partial

from tandem.checkpoint.decision import ResumeDecision, decide_resume
from tandem.checkpoint.listing import newest_step
from tandem.config import Settings, TaskJob
from tandem.config.slices import LaunchConfig
from tandem.distributed.position import Connection, Grant, Position, RankStart
from tandem.errors import INTERRUPTED_TWICE, KILLED, STOPPED
from tandem.launch.outgoing import TrackerProcesses, trackers_of
from tandem.launch.rendezvous import wait_for_master
from tandem.launch.run_dir import prepare_run_dir, scratch
from tandem.launch.torch_variables import use_loopback
from tandem.launch.view import NodeView
from tandem.log import reporting
from tandem.platforms.detection import Placement
from tandem.report.otel import OTEL
from tandem.report.web import load_access
from tandem.run.directory import RunDir
from tandem.run.lease import held
from tandem.signals import StopFlag
from tandem.text import format_duration, relative_path
from tandem.timeouts import AT_ONCE_SECONDS, MONITOR_SECONDS, START_STOP_SECONDS

# Handle a stop of a rank without an agent: report it, and end a blocked process.
#
# See docs/architecture.md#a-sigterm.

log = logging.getLogger("tandem.run")


class StandaloneStop:
    """Log at the first signal what will be saved, or end the process if there is nothing to save.

    A second Ctrl-C also ends the process.

    `leave(code, reason)` ends the process at once. Both callbacks run in the flag's own thread, so they work
    while the main thread is blocked in C.
    """

    def __init__(
        self,
        stop: StopFlag,
        run: RunDir,
        position: Position,
        resume: ResumeDecision,
        leave: Callable[[int, str], None],
    ) -> None:
        self._stop = stop
        self._position = position
        self._resume = resume
        self._leave = leave
        self._run = run
        self.is_over = False
        """Whether the run has ended and only its result remains to be shown."""
        stop.is_torchruns = position.platform == "torchrun"
        stop.listen(self._first_signal, self._second_signal)

    def _first_signal(self) -> None:
        if self.is_over:
            return
        deadline = time.monotonic() + START_STOP_SECONDS
        # Training may be about to take its first step, after which it can save.
        while not self._stop.is_polled and time.monotonic() < deadline:
            time.sleep(MONITOR_SECONDS)
        if not self._stop.is_polled:
            self._end_before_a_step()
        if self._position.rank == 0:
            text = "%s: finishing the current step, then saving to %s/checkpoints (%s); %s"
            again = "press Ctrl-C again to exit now"
            log.info(text, self._stop.name, relative_path(self._run.where), self._expected_duration(), again)

    def _expected_duration(self) -> str:
        """Return how long the save may take, as far as that is known in advance."""
        took = [event.get("seconds") for event in self._run.events() if event.get("kind") == "checkpoint"]
        message = (
            f"the last save took {format_duration(float(took[-1]))}" if took and took[-1] is not None else ""
        )
        limit = "torchrun allows 30 s" if self._position.platform == "torchrun" else ""
        return ", ".join(filter(None, [message, limit])) or "one step and one save"

    def _end_before_a_step(self) -> None:
        says = f"{self._stop.name} came before the first step; nothing to save"
        saved = self._resume.kind == "resume" or newest_step(self._run.checkpoints) is not None
        if saved:
            says = f"{says}; run the same command again to resume from the newest checkpoint"
        if self._position.rank == 0:
            log.info("%s", says)
        self._leave(STOPPED if saved else KILLED, says)

    def _second_signal(self) -> None:
        newest = newest_step(self._run.checkpoints)
        kept = "there is no checkpoint" if newest is None else f"the newest checkpoint is step {newest:,}"
        if self._position.rank == 0:
            log.warning("second Ctrl-C: exiting now; %s", kept)
        self._leave(INTERRUPTED_TWICE, "second Ctrl-C")


Decide = Callable[[], ResumeDecision]


def run_standalone_rank(
    run: RunDir,
    settings: Settings,
    placement: Placement,
    rank_function: Callable[..., int],
    chosen: frozenset[str],
) -> int:
    """Train as the rank that the environment sets, and return its exit code.

    Rank 0 also hosts the page and the metrics. `chosen` names the settings that were set explicitly.
    """
    decision = partial(decide_resume, settings, run.checkpoints)
    with contextlib.closing(StandaloneRank(run, settings, placement, decision)) as rank:
        code = rank_function(
            TaskJob(settings.to_dict(), chosen), rank.start, watch_stop_flag=rank.watch_stop_flag
        )
        rank.ended(code, f"the rank ended with code {code}")
        return code


class StandaloneRank:
    """A rank without an agent, from its position in the job until `close`.

    Rank 0 hosts the page and the metrics. It calls `decision` once it holds the lease on the run directory;
    without it, the script decides where it resumes.
    """

    def __init__(
        self, run: RunDir, settings: Settings, placement: Placement, decision: Decide | None = None
    ) -> None:
        self._run = run
        self._settings = settings
        self._view: NodeView | None = None
        self._stop = StopFlag()
        self._stopping = list[StandaloneStop]()
        if placement.is_one_host:
            use_loopback()
        run.make_private()
        met = placement if placement.platform == "torchrun" else placement.by_loopback()
        self.position = position_of(met)
        self._connection = connection_of(met, settings.launch)
        self._grant = Grant()
        with contextlib.ExitStack() as opened:
            if self.position.rank == 0:
                self._open_on_first_rank(opened, placement, decision)
            # With a file, init_process_group waits for the others.
            elif not self._connection.init.startswith("file:"):
                patience = settings.launch.master_timeout
                wait_for_master(*met.master, patience, lambda: False)
            self._opened = opened.pop_all()

    def _open_on_first_rank(
        self, opened: contextlib.ExitStack, placement: Placement, decision: Decide | None
    ) -> None:
        run = self._run
        settings = self._settings
        self._lease = opened.enter_context(held(run.where, placement))
        resume = decision() if decision is not None else None
        access = load_access(settings.metrics)
        prepare_run_dir(run, settings, self._lease, resume)
        folder = opened.enter_context(scratch())
        self._view = NodeView(run, settings, placement, None, folder, access)
        opened.callback(self._view.close)
        names = trackers_of(settings, os.environ)
        if OTEL in names:
            self._view.write_for_otel()
        if resume is None or resume.kind != "complete":  # counted as a start of the run, as under an agent
            self._view.generation_started(1, self.position)
        self._tracker = opened.enter_context(TrackerProcesses(names, run.folder))
        self._grant = Grant(
            sample_socket=str(self._view.socket_path),
            resume=resume or ResumeDecision("fresh"),
            owner=self._lease.token,
        )

    @property
    def start(self) -> RankStart:
        """All that this rank gets when it starts."""
        return RankStart(self.position, self._connection, self._grant)

    def ended(self, code: int, reason: str) -> None:
        """Record the end of the training; rank 0 shows it, and waits for a last scrape if there were any."""
        for stopping in self._stopping:
            stopping.is_over = True
        if self._view is not None:
            if self._lease.confirm_ownership():
                with reporting("show how the run ended"):
                    self._view.ended(code, reason)
                with reporting("tell the tracker"):
                    self._tracker.ended(code, lambda: self._stop.interrupts > 1)
                with reporting("copy the run's files"):
                    self._run.push()
            self._view.linger(self._stop)

    def watch_stop_flag(self, stop: StopFlag) -> None:
        """Report a stop from now on, and end this process at a second Ctrl-C (main thread only)."""
        self._stop = stop
        stopping = StandaloneStop(stop, self._run, self.position, self._grant.resume, self._leave_at_once)
        self._stopping.append(stopping)

    def _leave_at_once(self, code: int, reason: str) -> None:
        """End this process, whatever its main thread is doing, without leaving files or processes behind."""
        # A hung volume or tracker must not keep the process alive after a second Ctrl-C.
        last = threading.Timer(AT_ONCE_SECONDS, os._exit, (code,))
        last.daemon = True
        last.start()
        with contextlib.suppress(Exception):  # the main thread may be closing the same things
            for child in multiprocessing.active_children():  # DataLoader workers
                child.kill()
            if self._view is not None and self._lease.confirm_ownership():
                self._view.ended(code, reason)
                self._tracker.ended(code, lambda: True)
        with contextlib.suppress(Exception):
            self._opened.close()
        os._exit(code)

    def close(self) -> None:
        self._opened.close()


def position_of(placement: Placement) -> Position:
    """Return the rank's position; the number of ranks on its host is known only from a platform."""
    return Position(
        rank=placement.rank or 0,
        local_rank=placement.local_rank or 0,
        world_size=placement.world_size or 1,
        node_rank=placement.node_rank,
        nodes=placement.nodes,
        ranks_on_host=placement.nproc or 1,
        platform=placement.platform,
        node_name=placement.local_name or "localhost",
        device=placement.device,
    )


def connection_of(placement: Placement, launch: LaunchConfig) -> Connection:
    """Return how the rank finds the others: by its platform, by --master, or not at all for a single rank."""
    world_size = placement.world_size or 1
    init = "alone" if world_size == 1 else "env" if placement.platform == "torchrun" else "master"
    if world_size > 1 and launch.master is not None and not os.environ.get("MASTER_ADDR"):
        init = launch.master if launch.master.startswith("file:") else "master"
    return Connection(init=init, master=placement.master, patience=launch.master_timeout, job=placement.job)
