"""What a node's agent shows of the run: health on every node; metrics, events and the summary on node 0."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tandem.cluster.placement import Placement
from tandem.config import Settings
from tandem.errors import FINISHED, STOPPED
from tandem.observe.health import write_health
from tandem.observe.journal import Journal, write_json_atomic
from tandem.observe.metrics import Metrics
from tandem.observe.server import MetricsServer, SampleReceiver

log = logging.getLogger("tandem.node")

HEALTH_SECONDS = 1.0
SLACK_SECONDS = 60.0


class NodeView:
    """Receives its ranks' messages from construction to `close`; serves them on node 0."""

    def __init__(
        self, settings: Settings, placement: Placement, state_dir: Path | None, scratch: Path, run_dir: Path
    ) -> None:
        self._settings, self._placement, self._run_dir = settings, placement, run_dir
        self._started = time.time()
        self._began = time.monotonic()
        self._beats: dict[int, dict[str, Any]] = {}
        self.on_pulse: Callable[[Mapping[str, Any]], None] = lambda pulse: None
        self._restart_reason = "crash"
        self._state, self._last_progress = "starting", time.time()
        self._state_dir = state_dir
        self.socket_path = scratch / "samples.sock"
        self.metrics = Metrics()
        self._journal = Journal(run_dir) if placement.node_rank == 0 else None
        self._server: MetricsServer | None = None
        if placement.node_rank == 0:
            self._server = MetricsServer(
                self.metrics, settings.metrics_host, settings.metrics_port, self.status
            )
            log.info("metrics at http://%s:%d/metrics", self._server.host, self._server.port)
            self.metrics.apply(
                {"state": "starting", "set": [["tandem_run_start_timestamp_seconds", {}, self._started]]}
            )
        self._receiver = SampleReceiver(self.socket_path, self._receive, self.metrics.count_error)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_health, name="tandem-health", daemon=True)
        self._thread.start()

    def world_opened(self, number: int, position: Any) -> None:
        """The agent is about to start its ranks."""
        self._state, self._last_progress = "rendezvous", time.time()
        if self._journal is None:
            return
        self._journal.event("world", number=number, world_size=position.world_size, nodes=position.nodes)
        self.metrics.apply({"state": "rendezvous"})
        if number > 1:
            self.metrics.apply({"inc": [["tandem_restarts", {"reason": self._restart_reason}, 1]]})
            self._restart_reason = "crash"

    def hung(self, alarm: Any) -> None:
        """The watchdog named a rank; the world is about to be opened again."""
        self._restart_reason = "hang"
        if self._journal is not None:
            self._journal.event(
                "hang",
                rank=alarm.rank,
                node=alarm.node,
                phase=alarm.phase,
                step=alarm.step,
                seconds=alarm.seconds,
            )

    def ended(self, code: int, reason: str, worlds: int) -> None:
        """The job is over: final state, and the summary where rank 0 could not write one."""
        self._state = "succeeded" if code == FINISHED else "failed"
        if self._journal is None:
            return
        summary = self._run_dir / "summary.json"
        if code not in (FINISHED, STOPPED):
            beat = self._beats.get(0, {})
            self._journal.event("failed", exit_code=code, reason=reason)
            try:
                write_json_atomic(summary, self._failed_summary(code, reason, worlds, beat))
            except OSError as error:
                log.warning("cannot write %s: %s", summary, error)
        self.metrics.apply({"state": self._state})
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
        """The run as `/api/run` and the live page show it."""
        quiet = time.time() - self._last_progress
        beat = self._beats.get(0, {})
        return {
            "state": self._state,
            "healthy": quiet <= self._limit() and self._state != "failed",
            "run": self._settings.run_name or self._run_dir.name,
            "task": self._settings.task,
            "platform": self._placement.platform,
            "nodes": self._placement.nodes,
            "step": beat.get("step", 0),
            "steps_planned": beat.get("steps_planned"),
            "loss": beat.get("loss"),
            "samples_per_second": beat.get("samples_per_second"),
            "seconds_since_progress": round(quiet, 1),
            "ranks": [self._beats[rank] for rank in sorted(self._beats)],
        }

    def _receive(self, message: Mapping[str, Any]) -> None:
        if "pulse" in message:
            self.on_pulse(message["pulse"])
            return
        beat = message.get("heartbeat")
        if beat is not None:
            rank = int(beat["rank"])
            if beat["step"] != self._beats.get(rank, {}).get("step") or beat["activity"] != self._state:
                self._last_progress = time.time()
            self._beats[rank] = dict(beat)
            self._state = str(beat["activity"])
            return
        self.metrics.apply(message)

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

    def _write_health(self) -> None:
        if self._state_dir is None:
            return
        while not self._closing.wait(HEALTH_SECONDS):
            step = max((int(beat.get("step", 0)) for beat in self._beats.values()), default=0)
            try:
                os.makedirs(self._state_dir, exist_ok=True)
                write_health(
                    self._state_dir,
                    state=self._state,
                    step=step,
                    last_progress=self._last_progress,
                    limit_seconds=self._limit(),
                )
            except OSError as error:
                log.warning("cannot write health to %s: %s", self._state_dir, error)
                return

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
            "loss": beat.get("loss"),
            "eval": {},
            "samples_per_second": beat.get("samples_per_second"),
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
