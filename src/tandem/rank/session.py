"""Run the parts of a rank that are the same for every workload, from its log to its exit code."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tandem import __version__, layout
from tandem.checkpoint.decision import ResumeDecision
from tandem.checkpoint.snapshot import NO_DESTINATIONS
from tandem.code_files import difference, digests, imported_code
from tandem.config import Settings
from tandem.data.sampler import GlobalOrder
from tandem.data.tar_shards import BlockMetrics, limit_waits
from tandem.distributed.devices import (
    bind_to_node,
    choose_devices,
    compute_deterministically,
    set_threads,
)
from tandem.distributed.group import ProcessGroup
from tandem.distributed.neighbors import NeighborCopies
from tandem.distributed.position import RankStart
from tandem.distributed.strategy import Strategy
from tandem.errors import FINISHED
from tandem.log import log_if_slow, log_warnings, redirect_output, setup
from tandem.process import allow_open_files
from tandem.run.directory import RunDir
from tandem.schedule import Cadence
from tandem.telemetry.agent_state import count_log_messages
from tandem.telemetry.channel import Sender
from tandem.telemetry.clock import Clock
from tandem.telemetry.hangs import HangLimits
from tandem.telemetry.heartbeat import ClockLocator, Heartbeats
from tandem.telemetry.messages import Send
from tandem.telemetry.recorder import Recorder
from tandem.telemetry.stacks import keep_stacks
from tandem.training.loop import EventSchedule
from tandem.training.precision import precision_of
from tandem.training.rank_checks import replay_every
from tandem.training.resume import Redistribute, ResumePoint, begin, check_data
from tandem.training.saving import CheckpointSource, Saver, snapshot_every, snapshot_interval
from tandem.training.shards import ShardedReading
from tandem.training.summary import RunInfo, open_displays, write_summary

log = logging.getLogger("tandem.run")


class RankSession:
    """The parts of a rank that tasks, custom loops and evaluation share, from its log to its exit code.

    The methods are in the order in which a rank calls them, and each sets the fields that the later ones use.
    An evaluation calls only `open_group` and `close`, because it has no run directory.
    `with session:` calls `join` and, unless an error leaves the block, `close`. `given`: the settings as they
    were given; in `settings`, `--precision auto` is resolved.
    """

    world: ProcessGroup
    threads: int
    recorder: Recorder
    facts: RunInfo
    event_schedule: EventSchedule
    saver: Saver

    def __init__(self, settings: Settings, start: RankStart) -> None:
        self.given = self.settings = settings
        self.position = start.position
        self.connection = start.connection
        self.grant = start.grant
        self._sender = Sender(None)
        self.send: Send = self._sender.send
        """Sends messages to the agent, or to the page's host in this process, from `join` on."""
        self.clock = Clock()
        self.resume_point = ResumePoint(0, None)
        self.code = FINISHED
        """The rank's exit code. A run that was asked to stop sets it before its last save."""
        self.advice = ""
        """A remedy for the error that ends this rank, if known."""
        self._began = time.monotonic()
        self._data: Mapping[str, Any] = {}

    @cached_property
    def run(self) -> RunDir:
        """The run directory, which only a rank that trains has."""
        return RunDir.of(self.given, self.grant.owner)

    def open_log(self) -> None:
        """Log to the terminal and a file on rank 0, and only to a file on the others."""
        rank = self.position.rank
        path = self.run.rank_log(self.position.rank)
        if rank != 0:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                redirect_output(path)
            except OSError:
                pass  # a worker needs no volume; without one its output goes to the terminal
        # The other ranks' output already goes to their file, where a file handler would repeat each line.
        as_json = self.given.telemetry.log_format == "json"
        setup(path if rank == 0 else None, rank, self.position.node_rank, True, as_json)
        log_warnings()
        keep_stacks(self.run.logs, rank)

    def join(self) -> None:
        """Open the process group. Heartbeats are sent from here on.

        Raises ConfigError if ranks differ in a common setting, and for a missing device.
        """
        given = self.given
        clock = self.clock
        self._sender = Sender(self.grant.sample_socket)
        self.send = self._sender.send
        if self.connection.store is not None:  # without an agent, the server in this process counts them
            count_log_messages(self.send)
        for handler in logging.getLogger("tandem").handlers:
            handler.addFilter(clock.stamp)
        # Heartbeats begin before the rendezvous, so that the agent can detect a rank that hangs in it.
        self._begin_heartbeats()
        with clock.phase("rendezvous"), log_if_slow("waiting for the other ranks"):
            self.open_group(trains=True)
            # Ranks with different settings or versions could wait for each other in different collectives, so
            # check this before the run's collectives.
            self.world.check_same_settings({**given.common_fields(), "the version of tandem": __version__})
            if self.world.device.type == "cuda":
                # The group has connected, so this GPU works. If it is missing later, it failed.
                self.grant.note_gpu()
        clock.measure(self.world.device)
        self._use(given)

    def _begin_heartbeats(self) -> None:
        clock = self.clock
        limits = self.given.reliability
        rank = self.position.rank
        locator = ClockLocator(clock, self.run.logs / layout.flight(rank))
        hang_limits = HangLimits(limits.hang_seconds, limits.phase_timeout)
        heartbeats = Heartbeats(rank, locator, self.send, hang_limits)
        clock.on_activity = heartbeats.send

    def open_group(self, trains: bool = False) -> None:
        """Open the process group on this rank's devices, which is all that an evaluation needs."""
        compute = self.given.compute
        position = self.position
        self.threads = set_threads(compute.threads, position)
        had_gpu = self.grant.had_gpu
        devices = choose_devices(compute.device, position.gpu, compute.devices_per_rank, had_gpu)
        # cuBLAS reads its setting when it starts, and threads inherit their CPU binding. So do this before
        # the group opens.
        if compute.deterministic:
            compute_deterministically()
        if compute.numa_binding == "node":
            bind_to_node(devices)
        if compute.tf32 and devices[0].type == "cuda":
            # fp32 matrix products in TF32: 10 bits of mantissa, for up to 8 times the speed.
            torch.set_float32_matmul_precision("high")
        if trains:
            self._log_wait()
        limit = self.given.reliability.phase_timeout
        connection = self.connection
        self.world = ProcessGroup.open(
            position, connection, devices[0], limit, devices, connection.patience, had_gpu
        )

    def _log_wait(self) -> None:
        """Log which ranks this process waits for if no agent reports it."""
        connection = self.connection
        if connection.store is None and connection.init == "master" and connection.master is not None:
            # A rank that was started alone waits for long.
            where = ":".join(map(str, connection.master))
            size = self.position.world_size
            log.info("waiting for the other %d of %d ranks at %s", size - 1, size, where)

    def change(self, settings: Settings) -> None:
        """Continue with settings that a script has changed. Raises ConfigError if ranks differ in them."""
        self.world.check_same_settings(settings.common_fields())
        self._use(settings)

    def _use(self, given: Settings) -> None:
        world = self.world
        position = self.position
        self.given = given
        self.settings = given.replace(precision=precision_of(given.compute.precision, world))
        batch_size = given.data.batch_size
        self.recorder = Recorder(position.rank, batch_size, self.send, self.clock, position.node_rank)
        self.recorder.rank_samples.append(BlockMetrics(position.rank))
        limit_waits(given.reliability.hang_seconds)

    def resume(
        self,
        decision: ResumeDecision | None = None,
        destinations: Mapping[str, Tensor] = NO_DESTINATIONS,
        own: Collection[str] = (),
        redistribute: Redistribute | None = None,
        shards: ShardedReading | None = None,
    ) -> ResumePoint:
        """Return the state to begin with; see `resume.begin`. Without a `decision`, the agent's counts."""
        self.resume_point = begin(
            self.world,
            self.run.checkpoints,
            self.settings.checkpoint,
            self.grant if decision is None else replace(self.grant, resume=decision),
            self.recorder,
            self.settings.data.download,
            destinations,
            own,
            redistribute,
            shards,
        )
        return self.resume_point

    def check_data(self, dataset: Any, order: GlobalOrder) -> None:
        """Compare the training set with the checkpoint's. Raises ConfigError as `resume.check_data`."""
        on_change = self.settings.checkpoint.on_data_change
        self._data = check_data(self.world, self.resume_point, dataset, order, on_change)

    def plan(
        self,
        state: CheckpointSource,
        strategy: Strategy,
        order: GlobalOrder,
        planned: int,
        eval_every: str = "never",
        shares: tuple[int, ...] = (),
        recorded: Settings | None = None,
        micro_batch: int | None = None,
    ) -> None:
        """Prepare `facts`, `event_schedule` and `saver` for `planned` steps, once the state is loaded.

        Manifests have the settings in `recorded`, by default those given. `micro_batch`: see `RunInfo`.
        """
        settings = self.settings
        recorded = recorded or self.given
        resume_point = self.resume_point
        self.resume_point = replace(resume_point, state=None)  # the model and the optimizer have it now
        self.facts = RunInfo(
            run=settings.run,
            batch_size=settings.data.batch_size,
            precision=settings.compute.precision,
            settings=recorded.to_dict(),
            fingerprint=recorded.fingerprint_fields(),
            config_hash=self.given.digest(),
            world=self.world,
            directory=self.run,
            order=order,
            planned=planned,
            threads=self.threads,
            first_step=resume_point.step,
            resumed_from=resume_point.source,
            started=self._began,
            shares=shares,
            data=self._data,
            micro_batch=micro_batch,
            restart=self.grant.restart,
        )
        self.event_schedule = EventSchedule.of(
            order.steps_per_epoch,
            planned,
            log=settings.telemetry.log_every,
            eval=eval_every,
            save=settings.checkpoint.checkpoint_every,
            check=settings.reliability.replica_check_every,
            replay=replay_every(settings.reliability.replay_check),
            snapshot=snapshot_every(settings.checkpoint.snapshot_every, self.world, self.grant, strategy),
        )
        config = settings.checkpoint
        slots = (resume_point.slot, resume_point.own_slot)
        self.saver = Saver(
            config,
            self.facts,
            state,
            self.recorder,
            self.grant,
            *slots,
            resume_point.generation,
            strategy.shards_parameters,
            self._open_copies() if strategy.shards_parameters else None,
        )
        if config.snapshot_every == "auto":
            self.saver.on_copied = self._adapt_snapshots

    def _adapt_snapshots(self, size: int, seconds: float) -> None:
        """Set the interval of snapshots, which only rank 0 uses, after a copy of `size` bytes here."""
        interval = snapshot_interval(self.world.device.type, size, seconds)
        self.event_schedule.cadences["snapshot"] = Cadence(interval, "seconds")
        self.recorder.snapshots_every(interval)

    def _open_copies(self) -> NeighborCopies | None:
        """Connect the ranks of neighboring nodes, if there are several and they keep snapshots."""
        if self.position.nodes == 1 or self.event_schedule.cadences["snapshot"].unit == "never":
            return None
        return NeighborCopies.open(self.world, self.connection, self.grant, self.resume_point.held)

    def begin_run(self, model: nn.Module) -> None:
        """Open the displays, and remove the summary of an earlier end."""
        save_steps = self.event_schedule.steps_between("save")
        open_displays(self.facts, self.settings.telemetry, save_steps, self.recorder, model)
        if self.connection.store is None and self.position.nodes > 1:
            self._compare_code()

    def _compare_code(self) -> None:
        """Warn, once per node, about code that differs from rank 0's. Agents compare it themselves."""
        code = imported_code()
        theirs = self.world.broadcast_json(digests(code))
        if self.position.local_rank == 0 and (warning := difference(code, theirs)):
            log.warning("%s", warning)

    def finish(
        self, step: int, weights: Callable[[], Mapping[str, Any]], used: Mapping[str, object] = {}
    ) -> None:
        """Write the summary of a run that ends with `code`, and close the displays. Raises as `Saver.end`.

        All ranks call this, after the last save. `used`: see `write_summary`.
        """
        saver = self.saver
        finished = self.code == FINISHED
        if saver.writes:
            # If the last save failed, this raises before a summary reports the run as finished.
            saver.end(step, finished)
        # Sharded weights are gathered from all ranks, so this must be outside of both `if`s.
        last = weights()
        if self.world.is_first:
            ended_early = finished and saver.is_end
            write_summary(self.facts, self.recorder, last, saver.last_step, self.code, ended_early, used)
        self.recorder.close()

    def close(self) -> None:
        """Leave the process group after success; after a failure, it could wait for ranks that are gone."""
        self._sender.close()
        self.world.close()

    def __enter__(self) -> "RankSession":
        allow_open_files()
        self.join()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
