"""Start a rank: its log, its clock with heartbeats, and its process group.

Tasks and custom loops share this.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from tandem import __version__
from tandem.config.slices import ComputeConfig, ReliabilityConfig
from tandem.distributed.devices import allow_tf32, choose_devices, compute_deterministically, set_threads
from tandem.distributed.group import Position, ProcessGroup
from tandem.distributed.numa import bind_to_node
from tandem.log import log_warnings, redirect_output, setup
from tandem.run.directory import RunDir
from tandem.silence import still
from tandem.telemetry.clock import Clock
from tandem.telemetry.heartbeat import Heartbeats
from tandem.telemetry.messages import Send

log = logging.getLogger("tandem.run")


def set_up_log(log_format: str, position: Position, run: RunDir) -> None:
    """Log to the terminal and a file on rank 0, and only to a file on the others."""
    path = run.rank_log(position.rank)
    copy_to = path if position.rank == 0 else None
    if position.rank != 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            redirect_output(path)
        except OSError:
            pass  # a worker needs no volume; without one its output goes to the terminal
    setup(copy_to, position.rank, position.node_rank, True, log_format == "json")
    log_warnings()


def open_world(
    compute: ComputeConfig,
    reliability: ReliabilityConfig,
    common: Mapping[str, object],
    position: Position,
    send: Send,
    log_dir: Path,
) -> tuple[Clock, ProcessGroup, int]:
    """Open the process group; return the running clock, the group, and the number of CPU threads.

    Heartbeats are sent from here on. Raises ConfigError if ranks differ in the settings in `common`, and for
    a device that is missing.
    """
    clock = Clock()
    for handler in logging.getLogger("tandem").handlers:
        handler.addFilter(clock.stamp)
    Heartbeats(position.rank, clock, send, reliability, log_dir)
    with clock.phase("rendezvous"), still("waiting for the other ranks"):
        threads = set_threads(compute.threads, position)
        if compute.deterministic:
            compute_deterministically()
        devices = choose_devices(compute.device, position.gpu, compute.devices_per_rank, position.had_gpu)
        if compute.numa_binding == "node":
            bind_to_node(devices)
        if compute.tf32 and devices[0].type == "cuda":
            allow_tf32()
        if position.store is None and position.init == "master" and position.master is not None:
            # No agent reports this, and a rank that was started alone waits for a long time.
            where = ":".join(map(str, position.master))
            log.info(
                "waiting for the other %d of %d ranks at %s",
                position.world_size - 1,
                position.world_size,
                where,
            )
        limits = reliability.phase_timeout, position.patience
        world = ProcessGroup.open(position, devices[0], limits[0], devices, limits[1])
        world.check_same_settings({**common, "the version of tandem": __version__})
        if devices[0].type == "cuda":
            position.note_gpu()
    clock.measure(devices[0])
    return clock, world, threads
