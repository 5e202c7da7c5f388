"""What a node's agent shows of the run: health on every node; metrics, events and the summary on node 0."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tandem.config import Settings
from tandem.errors import FINISHED, STOPPED
from tandem.platforms.placement import Placement
from tandem.report.access import Access
from tandem.report.history import History
from tandem.report.server import MetricsServer
from tandem.signals import StopFlag
from tandem.telemetry import life
from tandem.telemetry.families import FINAL_STATES
from tandem.telemetry.gpu import Gpus
from tandem.telemetry.health import write_health
from tandem.telemetry.journal import Journal, write_json_atomic
from tandem.telemetry.metrics import Metrics
from tandem.telemetry.samples import SampleReceiver
from tandem.timeouts import GPU_SECONDS, NODE_TICK_SECONDS, SLACK_SECONDS, VOLUME_SECONDS

log = logging.getLogger("tandem.node")


class NodeView:
    """Receives its ranks' messages from construction to `close`; serves them on node 0."""

    def __init__(
        self,
        settings: Settings,
        placement: Placement,
        state_dir: Path | None,
        scratch: Path,
        run_dir: Path,
        access: Access | None = None,
        stop: StopFlag | None = None,
    ) -> None:
        self._settings, self._placement, self._run_dir = settings, placement, run_dir
        self._began = time.monotonic()
        self._beats: dict[int, dict[str, Any]] = {}
        self._plan: dict[str, Any] = {}
        self._done: dict[str, Any] = {}
        self.on_heartbeat: Callable[[Mapping[str, Any]], None] = lambda beat: None
        self._restart_reason = "crash"
        self._state, self._last_progress = "starting", time.time()
        self._state_dir, self._stop = state_dir, stop
        self._worlds, self._nodes = 0, placement.nodes
        self._signals_counted: dict[str, int] = {}
        self._clock, self._clock_lock = life.Clock(), threading.Lock()
        self.socket_path = scratch / "samples.sock"
        self.metrics = Metrics()
        self.metrics.before_page = self._bring_up_to_date
        self._closing = threading.Event()
        self._journal: Journal | None = None
        self._history: History | None = None
        self._server: MetricsServer | None = None
        if placement.node_rank == 0:
            self._open_to_the_world(settings, run_dir, access)
        life.count_log_messages(self.metrics.apply)
        self._receiver = SampleReceiver(self.socket_path, self._receive, self.metrics.count_error)
        self._thread = threading.Thread(target=self._tick, name="tandem-node", daemon=True)
        self._thread.start()

    def _open_to_the_world(self, settings: Settings, run_dir: Path, access: Access | None) -> None:
        """Node 0: journal, history and server."""
        self._journal, self._history = Journal(run_dir), History(run_dir)
        self._replays = life.Replays(self._history.last_step)
        host, port = settings.metrics_host, settings.metrics_port
        server = MetricsServer(self.metrics, host, port, self.status, self._history.curves, access)
        self._server = server
        log.info("live page at %s/, metrics at %s/metrics", server.url, server.url)
        started = time.time() - life.process_age_seconds()
        self.metrics.apply(
            {"state": "starting", "set": [["tandem_run_start_timestamp_seconds", {}, started]]}
        )
        # Asking a volume or a driver can hang, so nobody waits for this thread.
        threading.Thread(target=self._watch_hardware, name="tandem-hardware", daemon=True).start()

    def world_opened(self, number: int, position: Any) -> None:
        """The agent is about to start its ranks."""
        self._last_progress = time.time()
        if self._journal is None:
            return
        reason = "elastic" if position.nodes != self._nodes else self._restart_reason
        self._worlds, self._nodes = number, position.nodes
        self._event("world", number=number, world_size=position.world_size, nodes=position.nodes)
        self._enter("rendezvous")
        if number > 1:
            self.metrics.apply({"inc": [["tandem_restarts", {"reason": reason}, 1]]})
            self._restart_reason = "crash"

    def _event(self, kind: str, **fields: object) -> None:
        assert self._journal is not None and self._history is not None
        self._journal.event(kind, **fields)
        self._history.take({"event": {"time": time.time(), "kind": kind, **fields}})

    def _enter(self, state: str) -> None:
        """The run is in this state from now on, and time is charged to it."""
        with self._clock_lock:
            self._clock.enter(state)
        self._state = state
        self.metrics.apply({"state": state})

    def hung(self, alarm: Any) -> None:
        """The watchdog named a rank; the world is about to be opened again."""
        self._restart_reason = "hang"
        if self._journal is not None:
            self._event(
                "hang",
                rank=alarm.rank,
                node=alarm.node,
                phase=alarm.phase,
                step=alarm.step,
                seconds=alarm.seconds,
            )

    def ended(self, code: int, reason: str, worlds: int) -> None:
        """The job is over: final state, and the summary where rank 0 could not write one."""
        state = "succeeded" if code == FINISHED else "failed"
        if self._journal is None:
            self._state = state
            return
        summary = self._run_dir / "summary.json"
        if code not in (FINISHED, STOPPED):
            beat = self._beats.get(0, {})
            self._event("failed", exit_code=code, reason=reason)
            try:
                write_json_atomic(summary, self._failed_summary(code, reason, worlds, beat))
            except OSError as error:
                log.warning("cannot write %s: %s", summary, error)
        self._enter(state)
        try:
            self.metrics.write_last_page(self._run_dir / "metrics.prom")
        except OSError as error:
            log.warning("cannot write metrics.prom: %s", error)

    def linger(self, seconds: float, should_stop: Callable[[], bool]) -> None:
        """Give Prometheus the chance to see the final state, if it has ever looked."""
        if self._server is not None:
            self._server.linger(seconds, should_stop)

    def close(self) -> None:
        self._closing.set()
        self._receiver.close()
        self._thread.join()
        if self._server is not None:
            self._server.close()

    def status(self) -> dict[str, object]:
        """The run as `/api/run` and the live page show it. Times are Unix seconds, durations seconds."""
        quiet = time.time() - self._last_progress
        beat = self._beats.get(0, {})
        step, planned = int(beat.get("step", 0)), self._plan.get("steps_planned")
        rate = float(self._done.get("samples_per_second") or 0.0)
        left = (planned - step) * self._settings.batch_size / rate if planned and rate > 0 else None
        return {
            "state": self.metrics.state,
            "healthy": quiet <= self._limit() and self._state != "failed",
            "run": self._settings.run_name or self._run_dir.name,
            "task": self._settings.task,
            "platform": self._placement.platform,
            "nodes": self._nodes,
            "step": step,
            "steps_planned": planned,
            "loss": self._done.get("loss"),
            "samples_per_second": rate,
            "seconds_left": left,
            "seconds_since_progress": round(quiet, 1),
            "restarts": max(0, self._worlds - 1),
            "checkpoint_every": self._settings.checkpoint_every,
            "time": time.time(),
            **(self._history.now() if self._history is not None else {}),
        }

    def _receive(self, message: Mapping[str, Any]) -> None:
        if "heartbeat" in message:
            self._beat(message["heartbeat"])
            return
        self._plan = message.get("begin", self._plan)
        self._done = message.get("done", self._done)
        if self._history is not None:
            self._history.take(message)
            self._count_steps(message)
        self.metrics.apply(message)

    def _beat(self, beat: Mapping[str, Any]) -> None:
        rank, step, activity = int(beat["rank"]), int(beat["step"]), str(beat["activity"])
        before = self._beats.get(rank, {})
        self._beats[rank] = dict(beat)
        self.on_heartbeat(beat)
        if step != before.get("step") or activity != before.get("activity"):
            self._last_progress = time.time()
        if activity == before.get("activity") or self._state in FINAL_STATES:
            return
        self._state = activity
        if rank == 0:
            with self._clock_lock:
                self._clock.enter(life.STATE_OF[activity])
            self.metrics.apply({"state": life.STATE_OF[activity]})

    def _count_steps(self, message: Mapping[str, Any]) -> None:
        """Steps done again, and those that rank 0 had no time to report before it was killed."""
        steps = again = 0
        if "begin" in message:
            steps, again = self._replays.begin(int(message["begin"]["step"]))
        elif "done" in message:
            again = self._replays.advance(int(message["done"]["step"]))
        counts = {"steps": steps, "samples": steps * self._settings.batch_size, "steps_replayed": again}
        self.metrics.apply(
            {"inc": [[f"tandem_{name}", {}, count] for name, count in counts.items() if count]}
        )

    def _bring_up_to_date(self) -> None:
        """Counters that grow by themselves: wall time and signals."""
        with self._clock_lock:
            rows = self._clock.increments()
        if self._stop is not None:
            rows += life.signal_increments(self._stop.received, self._signals_counted)
        self.metrics.apply({"inc": rows})

    def _watch_hardware(self) -> None:
        gpus = Gpus()
        seconds = GPU_SECONDS if len(gpus) else VOLUME_SECONDS
        while True:
            self.metrics.apply({"set": life.volume_sizes(self._run_dir)})
            self.metrics.apply(gpus.sample())
            if self._closing.wait(seconds):
                return

    def _limit(self) -> float:
        """Seconds without progress that are still healthy in the present state."""
        settings = self._settings
        return SLACK_SECONDS + {
            "starting": settings.master_timeout,
            "rendezvous": settings.master_timeout,
            "startup": settings.first_step_timeout,
            "resume": settings.first_step_timeout,
            "train": float(settings.hang_timeout)
            if settings.hang_timeout != "auto"
            else settings.first_step_timeout,
        }.get(self._state, settings.first_step_timeout)

    def _tick(self) -> None:
        while not self._closing.wait(NODE_TICK_SECONDS):
            self._bring_up_to_date()
            if self._state_dir is not None:
                self._write_health(self._state_dir)

    def _write_health(self, state_dir: Path) -> None:
        step = max((int(beat.get("step", 0)) for beat in self._beats.values()), default=0)
        try:
            os.makedirs(state_dir, exist_ok=True)
            write_health(
                state_dir,
                state=self._state,
                step=step,
                last_progress=self._last_progress,
                limit_seconds=self._limit(),
            )
        except OSError as error:
            log.warning("cannot write health to %s: %s", state_dir, error)
            self._state_dir = None

    def _failed_summary(
        self, code: int, reason: str, worlds: int, beat: Mapping[str, Any]
    ) -> dict[str, object]:
        step = int(beat.get("step", 0))
        return {
            "state": "failed",
            "exit_code": code,
            "reason": reason,
            "task": self._settings.task,
            "platform": self._placement.platform,
            "world_size": self._placement.world_size,
            "nodes": self._placement.nodes,
            "epoch": None,
            "global_step": step,
            "samples_seen": step * self._settings.batch_size,
            "loss": self._done.get("loss"),
            "eval": {},
            "samples_per_second": self._done.get("samples_per_second"),
            "wall_seconds": round(time.monotonic() - self._began, 3),
            "weights_sha256": None,
            "restarts": max(0, worlds - 1),
            "resumed_from_step": None,
            "last_checkpoint_step": newest_checkpoint(self._run_dir),
        }


def newest_checkpoint(run_dir: Path) -> int | None:
    """The newest committed step by the names on disk, for a summary after a failure."""
    steps = [int(path.parent.name[5:]) for path in run_dir.glob("checkpoints/step-*/manifest.json")]
    return max(steps, default=None)
