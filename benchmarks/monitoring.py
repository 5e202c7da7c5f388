"""Measure what monitoring costs, and whether it reports the right straggler. Print one table, write one JSON.

    python benchmarks/monitoring.py --json build/monitoring.json [--trials 200]

Stragglers: one run of four ranks whose steps sleep 20 ms. In each trial of 20 steps, one rank, drawn at
random, sleeps 1.33 times as long, or none does. A trial succeeds if exactly that rank is marked after those
20 steps. The page, the metrics and the log report only a rank that is marked for longer. The false reports
are those that trials without a slow rank would cause if they followed each other.
Cost: one run of two ranks trains in blocks of 50 steps: without monitoring, with it (clocks, gather,
messages, and their receiver), and with it while a scraper on the same cores reads the series of 64 ranks once
a second.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.synchronize import Event as Flag
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from table import save
from tandem.config import Settings
from tandem.distributed.group import ProcessGroup
from tandem.distributed.position import Connection, Position
from tandem.distributed.strategy import load
from tandem.report.server import MetricsServer
from tandem.tasks.base import TaskWithDefaults
from tandem.telemetry import stragglers
from tandem.telemetry.channel import Receiver, Sender
from tandem.telemetry.clock import Clock
from tandem.telemetry.messages import Message, Samples
from tandem.telemetry.meter import Costs
from tandem.telemetry.recorder import Recorder
from tandem.telemetry.registry import Registry
from tandem.training.step import Proposal, TrainStep

RANKS = 4
WINDOW = 20
SLEEP_SECONDS = 0.02
SLOWED = 1.33
BLOCK_STEPS = 50
MODES = ("bare", "watched", "scraped")


class SleepyTask:
    """A small model whose loss takes `seconds`."""

    seconds = 0.0

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def build_datasets(self) -> Any:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_stepper(world: ProcessGroup, task: SleepyTask, batch: int) -> tuple[TrainStep, list[Any]]:
    torch.manual_seed(0)
    settings = Settings.from_dict({"batch_size": batch * world.size})
    strategy, compute, optimization = load("ddp", world), settings.compute, settings.optimization
    model = strategy.shard(task.build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    whole: Any = TaskWithDefaults(task)  # type: ignore[arg-type]
    train_step = TrainStep(
        world, strategy, compute, optimization, batch * world.size, 0, whole, model, optimizer, Clock()
    )
    micro_batches = [(torch.randn(batch, 64), torch.randint(10, (batch,)))]
    train_step.take_dry_step(micro_batches, 0, Costs())
    return train_step, micro_batches


def one_step(train_step: TrainStep, micro_batches: list[Any], step: int) -> None:
    train_step.clock.begin_step()
    train_step.clock.enter("transfer")
    train_step.take(micro_batches, step, Proposal())


def open_world(rank: int, ranks: int, port: int) -> ProcessGroup:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    connection = Connection(init="master", master=("127.0.0.1", port))
    return ProcessGroup.open(Position(rank=rank, world_size=ranks), connection, torch.device("cpu"), 300.0)


def name_stragglers(rank: int, port: int, trials: int, output: str) -> None:
    """Run `trials` with a slow rank and as many without, in random order."""
    world, task = open_world(rank, RANKS, port), SleepyTask()
    train_step, micro_batches = make_stepper(world, task, 8)
    draw = random.Random(7)  # the same on all ranks
    plan = [draw.randrange(RANKS) for _ in range(trials)] + [None] * trials
    draw.shuffle(plan)
    told, step, watch = {"named": 0, "wrong": 0, "false": 0, "lasting": 0}, 0, stragglers.StragglerWatch()
    for slow in plan:
        task.seconds = SLEEP_SECONDS * (SLOWED if rank == slow else 1)
        times: list[Any] = []
        for _ in range(WINDOW):
            one_step(train_step, micro_batches, step)
            times += train_step.clock.end_step()
            step += 1
        rows = world.gather_rows(stragglers.row_of(rank, times)).rows()
        verdict = stragglers.compare_ranks(stragglers.from_rows(rows))
        if verdict.marked:
            told["false" if slow is None else "named" if verdict.rank == slow else "wrong"] += 1
        if slow is None and watch.update(verdict):
            told["lasting"] += 1
    if rank == 0:
        Path(output).write_text(json.dumps(told))
    dist.barrier()
    os._exit(0)


def measure_cost(rank: int, port: int, blocks: int, folder: str, scraping: Flag) -> None:
    """Return the seconds per step of `blocks` blocks in each mode, in random order.

    `scraping` enables the scraper.
    """
    world, task = open_world(rank, 2, port), SleepyTask()
    train_step, micro_batches = make_stepper(world, task, 120)
    task.seconds = 0.003
    sender = Sender(Path(folder) / "s")
    recorder = Recorder(rank, 240, sender.send, train_step.clock)
    recorder.begin_run(0, 1000, 10**6, None, None, None)
    recorder.costs(Costs(4000.0, 5e8, 2, 10**5))
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    host_clock, bare, step = train_step.clock, BareClock(), 0
    draw = random.Random(3)  # the same on all ranks
    for mode in (mode for _ in range(blocks) for mode in draw.sample(MODES, len(MODES))):
        train_step.clock = bare if mode == "bare" else host_clock
        if rank == 0:
            (scraping.set if mode == "scraped" else scraping.clear)()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(BLOCK_STEPS):
            one_step(train_step, micro_batches, step)
            step += 1
            if mode != "bare":
                recorder.end_step(0.1)
                if step % BLOCK_STEPS == 0:
                    recorder.log_interval(step, train_step.read(), world.gather_rows)
        seconds[mode].append((time.perf_counter() - began) / BLOCK_STEPS)
    if rank == 0:
        (Path(folder) / "cost.json").write_text(json.dumps(seconds))
    dist.barrier()
    os._exit(0)


class BareClock(Clock):
    """A clock that measures nothing and adds no callbacks to backward."""

    def begin_step(self) -> None: ...
    def enter(self, phase: str) -> None: ...
    def enter_backward(self, loss: torch.Tensor) -> None: ...


def scrape(url: str, stop: threading.Event, scraping: Flag, seconds: list[float]) -> None:
    """Scrape once a second while enabled, like Prometheus with a scrape interval of 1 s."""
    while not stop.wait(1.0):
        if not scraping.is_set():
            continue
        began = time.perf_counter()
        with urllib.request.urlopen(url, timeout=10) as answer:
            answer.read()
        seconds.append(time.perf_counter() - began)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def straggler_trials(trials: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "told.json")
        spawn(name_stragglers, (free_port(), trials, output), RANKS)  # type: ignore[no-untyped-call]
        told: Mapping[str, int] = json.loads(Path(output).read_text())
    return {
        "straggler_trials": trials,
        "straggler_named": told["named"] / trials,
        "straggler_named_wrongly": told["wrong"] / trials,
        "straggler_false_alarms": told["false"] / trials,
        "straggler_lasting_names": told["lasting"],
    }


def costs(blocks: int) -> dict[str, float]:
    metrics = Registry()
    ranks = stragglers.from_rows([[rank // 8] + [0.01] * (stragglers.ROW_LENGTH - 1) for rank in range(64)])
    metrics.apply(stragglers.StragglerWatch().report(ranks).samples)
    stop, scrapes, scraping = threading.Event(), list[float](), get_context("spawn").Event()
    with tempfile.TemporaryDirectory() as folder:
        def apply(message: Message) -> None:
            if isinstance(message, Samples):
                metrics.apply(message.samples)

        receiver = Receiver(Path(folder) / "s", apply)
        server = MetricsServer(metrics, "127.0.0.1", 0, dict)
        scraper = threading.Thread(target=scrape, args=(f"{server.url}/metrics", stop, scraping, scrapes))
        scraper.start()
        spawn(measure_cost, (free_port(), blocks, folder, scraping), 2)  # type: ignore[no-untyped-call]
        stop.set()
        scraper.join()
        server.close()
        receiver.close()
        times = json.loads((Path(folder) / "cost.json").read_text())
    return {
        "cost_blocks": blocks,
        "step_milliseconds": 1e3 * statistics.median(times["bare"]),
        **added("cost_of_watching", times["watched"], times["bare"]),
        **added("cost_of_scraping", times["scraped"], times["watched"]),
        "scrapes": len(scrapes),
        "page_milliseconds": 1e3 * statistics.median(scrapes or [0.0]),
        "page_bytes": len(metrics.page()),
    }


def added(name: str, more: Sequence[float], less: Sequence[float]) -> dict[str, float]:
    """Return the relative extra time of `more`, and its standard error.

    Blocks of a round follow each other, so other load affects them equally. The result is the median over
    rounds.
    """
    ratios = [one / other for one, other in zip(more, less, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {name: statistics.median(ratios) - 1, f"{name}_error": 0.93 * (high - low) / len(ratios) ** 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = straggler_trials(options.trials) if options.trials else {}
    result |= costs(options.blocks) if options.blocks else {}
    for name, value in result.items():
        print(f"{name:<28} {value:.4g}")
    if options.json is not None:
        save(result, options.json)


if __name__ == "__main__":
    main()
