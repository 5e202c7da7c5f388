"""Show the run to the outside: health on every node; metrics, events and the summary on node 0."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tandem import layout, running_clock
from tandem.checkpoint.listing import newest_step
from tandem.config import Settings
from tandem.config.address import secrets_in
from tandem.distributed.position import Position
from tandem.errors import FINISHED, INTERRUPTED_TWICE, KILLED, MISCONFIGURED, STOPPED
from tandem.launch.outgoing import Outgoing
from tandem.launch.this_machine import chosen_gpus
from tandem.log import log_if_slow, renew_outputs, reporting
from tandem.platforms.detection import Placement
from tandem.report.about import About
from tandem.report.goodput import time_of
from tandem.report.history import History, block_reads
from tandem.report.inspection import Ask
from tandem.report.server import MetricsServer
from tandem.report.web import Access
from tandem.run.directory import RunDir
from tandem.signals import StopFlag
from tandem.telemetry import agent_state, health, ledger, metrics
from tandem.telemetry.channel import Receiver
from tandem.telemetry.gpu import Gpus
from tandem.telemetry.hangs import Alarm
from tandem.telemetry.journal import Journal, Restarts
from tandem.telemetry.ledger import LedgerFile
from tandem.telemetry.messages import Event, Heartbeat, Message, RunStarted, Samples, StepsDone
from tandem.telemetry.metrics import FINAL_STATES, Sample
from tandem.telemetry.registry import Registry
from tandem.telemetry.spans import OtelFiles
from tandem.telemetry.verdict import measured, verdict
from tandem.timeouts import GPU_SECONDS, NODE_TICK_SECONDS, RUN_HEALTH_SECONDS, VOLUME_SECONDS

log = logging.getLogger("tandem.node")


class NodeView:
    """Receive the messages of this node's ranks, from construction to `close`; on node 0, serve them."""

    def __init__(
        self,
        run: RunDir,
        settings: Settings,
        placement: Placement,
        state_dir: Path | None,
        scratch: Path,
        access: Access | None = None,
        stop: StopFlag | None = None,
        tick_seconds: float = NODE_TICK_SECONDS,
    ) -> None:
        self._run = run
        self._tick_seconds = tick_seconds
        self._settings = settings
        self._placement = placement
        self._began = time.monotonic()
        self._beats: dict[int, Heartbeat] = {}
        self.pids: Mapping[int, int] = {}
        self.plan: RunStarted | None = None
        self._done = StepsDone(0, None, 0.0)
        self.on_heartbeat: Callable[[Heartbeat], None] = lambda beat: None
        self.newest_snapshot: Callable[[], int | None] = lambda: None
        """The step of the newest state in this node's memory, if any."""
        self.newest_copy: Callable[[], int | None] = lambda: None
        """The step of the newest copy of another node's shards there, if any."""
        self._limits = health.HealthLimits.from_settings(settings.launch, settings.reliability)
        self.last_words = ""  # the reason given by the first rank that failed
        self._state = "starting"
        self.last_progress = running_clock.now()
        self._health_file = agent_state.HealthFile(state_dir)
        self._stop = stop
        self.linger_seconds = settings.metrics.metrics_linger
        self._ending: dict[str, object] | None = None
        self._restarts = Restarts()
        self._nodes = placement.nodes
        self._spares: list[int] | None = None  # the waiting nodes; None without --spares
        self._world_size = placement.world_size
        self._signals_counted: dict[str, int] = {}
        age = agent_state.process_age_seconds()
        self._activities = agent_state.Activities(self._began - age)
        self._ledger = LedgerFile(run.folder / layout.GOODPUT, time.time() - age, self._began - age)
        self._time: Mapping[str, object] = {}  # as the pages show it; empty on other nodes
        self._replays = agent_state.Replays()
        self.socket_path = scratch / "samples.sock"
        self.metrics = Registry(node=placement.node_rank)
        self._otel = OtelFiles(run.logs, self.metrics.snapshot)
        self.metrics.before_page = self._update_own_counters
        self._closing = threading.Event()
        self._journal: Journal | None = None
        self._history: History | None = None
        self._server: MetricsServer | None = None
        self._outgoing = Outgoing()
        webhook = settings.telemetry.notify
        secrets = [*secrets_in(os.environ), (access.token if access else None) or ""]
        self._about = About(run.folder, [*secrets, *(webhook.secrets() if webhook is not None else ())])
        if placement.node_rank == 0:
            self._open_on_first_node(settings, access)
        agent_state.count_log_messages(self.receive)
        self._receiver = Receiver(self.socket_path, self.receive, self.metrics.count_error)
        self._thread = threading.Thread(target=self._tick, name="tandem-node", daemon=True)
        self._thread.start()
        # A call to a volume or a driver can hang, so no code waits for this thread.
        threading.Thread(target=self._watch_hardware, name="tandem-hardware", daemon=True).start()
        self._health_thread = threading.Thread(target=self._show_health, name="tandem-health", daemon=True)
        if placement.node_rank == 0:
            self._health_thread.start()

    def _open_on_first_node(self, settings: Settings, access: Access | None) -> None:
        """Open the journal, the history and the server, on node 0."""
        self._journal, self._history = self._run.journal, History(self._run)
        self._replays = agent_state.Replays(self._history.last_step)
        self._restarts = Restarts(self._run.events())
        earlier = self._restarts.earlier(settings.checkpoint.resume == "never")
        host, port = settings.metrics.host_and_port
        shown = self.status, self._history.curves, access, self._about.read, self._log
        server = self._server = MetricsServer(self.metrics, host, port, *shown)
        log.info("live page at %s/, metrics at %s/metrics", server.url, server.url)
        started = time.time() - agent_state.process_age_seconds()
        self.metrics.apply(
            [metrics.RUN_STATE.enter("starting"), metrics.RUN_START_TIMESTAMP_SECONDS.set(started)]
            + [self._info()]
            + earlier
        )

    def _info(self) -> Sample:
        """Return the run's name, for alerts about runs that end early; rank 0 sets the other labels."""
        return metrics.RUN_INFO.set(
            run=self._run.folder.name,
            task=self._settings.run.task,
            platform=self._placement.platform,
            backend="",
            precision="",
            config_hash="",
        )

    def inspect_by(self, ask: Ask) -> None:
        """Let readers of the page with the token look inside the ranks through `ask`, on node 0."""
        if self._server is not None:
            self._server.inspection.ask = ask

    def tell_outside(self) -> None:
        """Begin to send messages to the webhook and the platform; node 0's agent only, never a rank."""
        events = self._run.events()
        tells = self.receive, self.event, self._about.hide
        self._outgoing.open(self._settings, os.environ, self._run.folder.name, events, *tells)

    def flush_outside(self, stop: StopFlag) -> None:
        """Wait for the last of these messages, with a limit."""
        self._outgoing.flush(stop)

    def write_for_otel(self) -> None:
        """Start to write data for OpenTelemetry; only on node 0, before the ranks start."""
        known = {"tandem.run": self._run.folder.name, "tandem.task": self._settings.run.task}
        with reporting("write data for OpenTelemetry"):
            self._otel.open({**known, "tandem.platform": self._placement.platform})

    def rejoining(self) -> None:
        """Record that the ranks of a generation have ended and the agent waits for the other nodes."""
        self.last_progress = running_clock.now()
        self._state = "rendezvous"
        if self._journal is not None:
            self._ledger.ended(time.monotonic())
            self._enter("rendezvous")
        self._otel.ended()

    def waits_as_spare(self) -> None:
        """Record that the agent waits for a place in the job, and that the store has just answered."""
        self.last_progress = running_clock.now()
        self._state = "spare"

    def show_spares(self, waiting: Sequence[int]) -> None:
        """Show on the page and in the metrics which nodes wait as spares; node 0 only."""
        self._spares = list(waiting)
        self.metrics.apply([metrics.SPARE_NODES.set(len(waiting))])

    def generation_started(self, number: int, position: Position) -> None:
        """Record that the agent is about to start its ranks."""
        self.last_progress = running_clock.now()
        self.last_words = ""
        if self._journal is None:
            return
        self._nodes = position.nodes
        self._world_size = position.world_size
        anew = {"anew": True} if number == 1 and self._settings.checkpoint.resume == "never" else {}
        self.event("world", number=number, world_size=self._world_size, nodes=self._nodes, **anew)
        sizes = {"tandem.nodes": self._nodes, "tandem.world_size": self._world_size}
        self._otel.started({"tandem.generation": number, **sizes})
        self._enter("rendezvous")

    def ranks_started(self, pids: Mapping[int, int]) -> None:
        """Record the processes {rank: pid} of this node."""
        self.pids = dict(pids)

    def event(self, kind: str, **fields: object) -> None:
        """Write an event to events.jsonl and to the page; node 0 only."""
        assert self._journal is not None and self._history is not None
        self._journal.event(kind, **fields)
        event = Event(kind, time.time(), fields)
        self._history.handle(event)
        self._outgoing.handle(event)
        if (cause := ledger.cause_of(kind, fields)) is not None:
            self._ledger.set_cause(cause)
        self._otel.event(kind, fields)
        if (counted := self._restarts.count(kind, fields)) is not None:
            self.metrics.apply([counted])

    def _enter(self, state: str) -> None:
        """Enter a state of the run; time is charged to it from now on."""
        now = time.monotonic()
        self._activities.enter(state, now)
        self._ledger.enter(agent_state.ACTIVITY_OF[state], now)
        self._state = state
        self.metrics.apply([metrics.RUN_STATE.enter(state)])

    def hung(self, alarm: Alarm) -> None:
        """Record the rank that the watchdog identified; the next generation is about to begin."""
        if self._journal is not None:
            named = ("rank", "node", "phase", "step", "seconds")
            self.event("hang", **{name: getattr(alarm, name) for name in named})

    def ended(self, code: int, reason: str) -> None:
        """Record that the job is over: the final state, and the summary if rank 0 has not written one."""
        state = {FINISHED: "succeeded", STOPPED: "stopped"}.get(code, "failed")
        if code in (KILLED, INTERRUPTED_TWICE) and self._stop and self.plan is None:
            state = "stopped"  # there was nothing to save yet
        if self._journal is None:
            self._state = state
            return
        summary = self._run.folder / layout.SUMMARY
        ending = {FINISHED: "finished", STOPPED: "stopped"}.get(code, "failed")
        self._ending = {"state": ending, "exit_code": code, "reason": reason}
        if ending == "failed" or not summary.exists():
            self.event(ending, exit_code=code, reason=reason)
            # The summary of the previous launch still describes the run, which this launch has not touched.
            if code == MISCONFIGURED and self.plan is None and summary.exists():
                log.info("kept %s of the previous launch, because this launch was refused", summary)
            else:
                with reporting("write summary.json"):
                    self._run.write_summary(self._summary(ending, code, reason))
        with reporting("say what limits the run"):
            self._write_verdict()
        self._outgoing.ended("stopped" if state == "stopped" else ending, code, reason)
        self._enter(state)
        self._ledger.closed(ledger.CAUSE_OF_STATE[state], time.monotonic())
        self._write_ledger()
        with reporting("write the last metrics for OpenTelemetry"):
            known = {"tandem.exit_code": code, "tandem.step": self.rank_0_step()}
            self._otel.finish(ledger.CAUSE_OF_STATE[state], self._about.hide(reason), known)
        with reporting("write metrics.prom"):
            self.metrics.write_last_page(self._run.folder / layout.METRICS_PAGE)

    def _write_ledger(self) -> None:
        with reporting("write goodput.jsonl"):
            self._ledger.write(time.monotonic())
        self._account()

    def _account(self) -> None:
        """Show where the wall time went, on the page and as metrics."""
        now = self._ledger.total(time.monotonic())
        self._time = time_of(now)
        self.metrics.apply(now.samples())

    def _write_verdict(self) -> None:
        """Log what limits this launch, if anything does, and add it to the summary."""
        if self.plan is None and not self._done.step and not self.rank_0_step():
            return  # this launch has trained nothing, and the summary may be an earlier one's
        sentence = self._verdict()
        if sentence is not None:
            log.info("what limits this run: %s", sentence)
            self._run.write_summary({**self._run.files().read(layout.SUMMARY), "verdict": sentence})

    def linger(self, stop: StopFlag) -> None:
        """Wait until Prometheus has scraped the final state, if it has ever scraped this run.

        A stopped run waits as well, within --shutdown-timeout, because an unseen stop looks like a lost node.
        A second Ctrl-C ends the wait, and so does a signal that arrives only now.
        """
        if self._server is None:
            return
        is_stopped = bool(stop)
        limit = (stop.at or 0.0) + self._settings.launch.shutdown_timeout

        def is_over() -> bool:
            return stop.interrupts > 1 or (running_clock.now() > limit if is_stopped else bool(stop))

        with log_if_slow(f"waiting for the last scrape, up to {self.linger_seconds:g} s; Ctrl-C ends it"):
            self._server.linger(self.linger_seconds, is_over)

    def close(self) -> None:
        self._closing.set()
        self._ledger.due.set()
        self._otel.close()
        self._outgoing.close()
        self._receiver.close()
        self._thread.join()
        if self._health_thread.is_alive():
            self._health_thread.join(self._tick_seconds)
        self._health_file.write(self._health())  # records the end of a run shorter than a tick
        if self._ending is not None:
            self._write_ledger()
        if self._server is not None:
            self._server.close()

    def status(self) -> dict[str, object]:
        """Return the run as `/api/run` and the live page show it.

        Times are Unix seconds, durations are seconds.
        """
        healthy, says = health.assess(self._health(), time.time())
        step = self.rank_0_step()
        rate = self._done.samples_per_second
        planned = self.plan.steps_planned if self.plan is not None else None
        left = (planned - step) * self._settings.data.batch_size / rate if planned and rate > 0 else None
        return {
            "state": self.metrics.state,
            "ending": self._about.hidden(self._ending),
            "healthy": healthy,
            "health": says,
            "run": self._run.folder.name,
            "task": self._settings.run.task,
            "platform": self._placement.platform,
            "nodes": self._nodes,
            **({} if self._spares is None else {"spares": self._spares}),
            "step": step,
            "steps_planned": planned,
            "loss": self._done.loss,
            "samples_per_second": rate,
            "seconds_left": left,
            "seconds_since_progress": round(self.quiet_seconds, 1),
            "restarts": self._restarts.total,
            "planned_stops": self._restarts.planned_stops,
            "snapshots": self._steps_in_memory(metrics.SNAPSHOT_STEP),
            "copies": self._steps_in_memory(metrics.NEIGHBOR_COPY_STEP),
            "snapshot_interval": self.metrics.value(metrics.SNAPSHOT_INTERVAL_SECONDS),
            "checkpoint_every": self._settings.checkpoint.checkpoint_every,
            "blocks": block_reads(self.metrics),
            "verdict": self._verdict(),
            "goodput": self._time,
            "time": time.time(),
            **(self._about.hidden(self._history.now()) if self._history is not None else {}),
        }

    def _steps_in_memory(self, family: metrics.Gauge) -> dict[str, int]:
        """Return {node: step} of each node that has such a state in its memory."""
        return {str(node): int(step) for node, step in sorted(self.metrics.by_node(family).items())}

    def _verdict(self) -> str | None:
        """Return in one sentence what limits this launch, from its metrics; None if nothing does."""
        return verdict(measured(self.metrics.page().decode(), self._settings.to_dict()))

    def _log(self) -> Mapping[str, object]:
        """Return the end of a log: of the rank that failed, if one has, or else of rank 0."""
        return self._about.log(self.last_words or str((self._ending or {}).get("reason", "")))

    def receive(self, message: Message) -> None:
        """Handle a message from one of this node's ranks."""
        if self._history is not None:
            self._history.handle(message)
        if not isinstance(message, Event):  # a rank's events; those of this agent count
            self._outgoing.handle(message)
        self._otel.handle(message)
        match message:
            case Heartbeat():
                self._beat(message)
            case Samples(samples):
                self.metrics.apply(samples)
                self._ledger.observe(samples)
            case RunStarted(step):
                self.plan = message
                self._ledger.begins(step, time.monotonic())
                self._count_steps(*self._replays.begin(step))
            case StepsDone(step):
                self._done = message
                self._count_steps(0, self._replays.advance(step))
            case Event("rank_failed", _, values):
                self.last_words = self.last_words or str(values.get("reason", ""))

    def _beat(self, beat: Heartbeat) -> None:
        before = self._beats.get(beat.rank)
        self._beats[beat.rank] = beat
        self.on_heartbeat(beat)
        moved = before is None or beat.activity != before.activity
        # A heartbeat alone is no progress: its thread keeps running while training hangs.
        if before is None or moved or beat.step != before.step:
            self.last_progress = running_clock.now()
            if beat.rank == 0:
                self._ledger.finished(beat.step, time.monotonic())
        if not moved or self._state in FINAL_STATES:
            return
        if beat.rank == 0:
            self._enter(agent_state.STATE_OF.get(beat.activity, "training"))
        self._state = beat.activity

    def _count_steps(self, unreported: int, again: int) -> None:
        """Count the steps that a killed rank 0 could not report, and the steps that are repeated."""
        samples = unreported * self._settings.data.batch_size
        self.metrics.apply([
            metrics.STEPS.inc(unreported), metrics.SAMPLES.inc(samples), metrics.STEPS_REPLAYED.inc(again),
        ])  # fmt: skip

    def _update_own_counters(self) -> None:
        """Update the counters that grow on their own (wall time, signals), and the ranks' memory use."""
        if self._journal is not None:
            received = {} if self._stop is None else self._stop.received
            signals = agent_state.signal_increments(received, self._signals_counted)
            self.metrics.apply([*self._activities.take(time.monotonic()), *signals])
        if (step := self.newest_snapshot()) is not None:
            self.metrics.apply([metrics.SNAPSHOT_STEP.set(step)])
        if (step := self.newest_copy()) is not None:
            self.metrics.apply([metrics.NEIGHBOR_COPY_STEP.set(step)])
        sizes = {rank: agent_state.resident_bytes(pid) for rank, pid in self.pids.items()}
        self.metrics.apply([
            metrics.RANK_MEMORY_BYTES.set(size, rank=rank) for rank, size in sizes.items() if size
        ])  # fmt: skip

    def _watch_hardware(self) -> None:
        gpus = Gpus(names=chosen_gpus(os.environ))
        seconds = GPU_SECONDS if len(gpus) else VOLUME_SECONDS
        if self._journal is not None:
            self._about.write(gpus.names())
        while True:
            if self._journal is not None:
                self.metrics.apply(agent_state.volume_sizes(self._run.folder))
            self.metrics.apply(gpus.sample())
            if self._closing.wait(seconds):
                return

    def _show_health(self) -> None:
        """Write to the run directory, for `tandem health RUN_DIR`, in a thread: the volume may hang."""
        while True:
            with suppress(OSError):  # the journal and the saves report what is wrong with the volume
                health.write_run_health(self._run.folder, self._health())
                self._ledger.write(time.monotonic())
            self._account()
            self._ledger.due.wait(RUN_HEALTH_SECONDS)
            self._ledger.due.clear()
            if self._closing.is_set():
                return

    def _health(self) -> dict[str, object]:
        """Return this node's state as `health.assess` reads it."""
        step = max((beat.step for beat in self._beats.values()), default=0)
        return health.record(self._state, step, self.quiet_seconds, self._limits.of(self._state))

    @property
    def quiet_seconds(self) -> float:
        """Seconds since the last progress; time in which this process was stopped does not count."""
        return running_clock.now() - self.last_progress

    @property
    def restarts(self) -> int:
        """How often ranks were restarted in this run, in this launch and earlier ones."""
        return self._restarts.total

    def rank_0_step(self) -> int:
        """Return the number of steps that rank 0 had finished at its last heartbeat."""
        return self._beats[0].step if 0 in self._beats else 0

    def describe_position(self, rank: int) -> str:
        """Return where a rank of this node was at its last heartbeat."""
        beat = self._beats.get(rank)
        return f"(in {beat.phase or beat.activity} of step {beat.step})" if beat is not None else ""

    def _tick(self) -> None:
        while not self._closing.wait(self._tick_seconds):
            self._update_own_counters()
            renew_outputs()
            self._health_file.write(self._health())

    def _summary(self, state: str, code: int, reason: str) -> dict[str, object]:
        step = (code == STOPPED and newest_step(self._run.checkpoints)) or self.rank_0_step()
        return {
            "state": state,
            "exit_code": code,
            "ended_early": False,
            "reason": reason,
            "task": self._settings.run.task,
            "platform": self._placement.platform,
            "world_size": self._world_size,
            "nodes": self._placement.nodes,
            "epoch": None,
            "global_step": step,
            "samples_seen": step * self._settings.data.batch_size if self.plan is not None else None,
            "loss": self._done.loss,
            "eval": {},
            "samples_per_second": self._done.samples_per_second,
            "wall_seconds": round(time.monotonic() - self._began, 3),
            "weights_sha256": None,
            "restarts": self._restarts.total,
            "planned_stops": self._restarts.planned_stops,
            "resumed_from_step": None,
            "last_checkpoint_step": newest_step(self._run.checkpoints),
        }
