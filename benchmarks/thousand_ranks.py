"""Measure the work of node 0 and rank 0 for 1,024 ranks, in one process: CPU time, not wall time.

    python benchmarks/thousand_ranks.py [--ranks 1024] [--per-node 8] [--samples 100000000] [--json FILE]
    python benchmarks/thousand_ranks.py --only order --samples 1000000000

The code is tandem's own, with the input that so many ranks would send. The store is a real one that contains
the other nodes' values, read over loopback. Each figure is the median of some calls. Work that is done once
per start or per log interval is compared with 50 ms. For work that is done several times a second, the figure
is the fraction of a core.
"""

import argparse
import json
import logging
import pickle
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from table import Row, finish
from tandem.config.slices import LaunchConfig
from tandem.data.sampler import STEPS_AT_ONCE, GlobalOrder
from tandem.distributed.consensus import ConsensusReader, pack, proposal_slots
from tandem.launch.rendezvous_state import STATE_KEY, LastCall, WatchfulBackend, poll_intervals
from tandem.launch.watchdog import NODES_AT_ONCE, Watchdog, _NodeBeats
from tandem.platforms.detection import detect
from tandem.telemetry import metrics
from tandem.telemetry.hangs import Beat, find_hung_rank
from tandem.telemetry.messages import pack_samples
from tandem.telemetry.meter import Consensus
from tandem.telemetry.metrics import Gauge
from tandem.telemetry.registry import Registry
from tandem.telemetry.stragglers import ROW_LENGTH, StragglerWatch, from_rows
from tandem.timeouts import WATCHDOG_TICK_SECONDS

LIMIT_MS = 50.0
CALLS = 5


def cpu_ms(work: Callable[[], object], calls: int = CALLS) -> float:
    """Return the median CPU time of a call in milliseconds, over all threads of this process."""
    work()
    taken = []
    for _ in range(calls):
        began = time.process_time()
        work()
        taken.append(1e3 * (time.process_time() - began))
    return statistics.median(taken)


def row(name: str, ms: float, every: float | None = None) -> Row:
    """Return a row; `every`: seconds between two such calls, for repeated work."""
    share = f"{ms / 10 / every:.1f}% of a core" if every else ""
    return Row(
        name, CALLS, f"{ms:.2f} ms", "", share, f"at most {LIMIT_MS:g} ms", ms <= LIMIT_MS, seconds=ms / 1000
    )


def placement(nodes: int) -> Row:
    environ = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(nodes),
        "SLURM_PROCID": str(nodes - 1),
        "SLURM_NODEID": str(nodes - 1),
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_STEP_NODELIST": f"node[0001-{nodes:04d}]",
        "SLURM_JOB_NODELIST": f"node[0001-{nodes:04d}]",
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{nodes})",
    }
    ms = cpu_ms(lambda: detect(environ, f"node{nodes:04d}", LaunchConfig()))
    return row(f"placement of the last of {nodes} nodes, Slurm", ms)


def consensus(ranks: int) -> Row:
    """Measure rank 0's part of a step's consensus; the sum over ranks is inside the gradient all-reduce."""
    group: Any = SimpleNamespace(device=torch.device("cpu"), size=ranks)
    reader, numbers = ConsensusReader(group, ["accuracy"]), torch.tensor([0.5, 3.0, 4.0])

    def agree() -> Consensus | None:
        exchanged = torch.cat([pack(proposal_slots(False, 1), numbers), torch.zeros(1)])
        return reader.read(1, exchanged)

    return row("consensus: work of rank 0 per step", cpu_ms(agree, 50))


def stragglers(ranks: int, per_node: int) -> Row:
    """Measure from the gathered tensor to metrics and the page's rows."""
    gathered = torch.rand(ranks, ROW_LENGTH, dtype=torch.float64)
    gathered[:, 0] = torch.arange(ranks) // per_node
    watch, registry = StragglerWatch(), Registry()

    def view() -> None:
        report = watch.report(from_rows(gathered.tolist()))
        registry.apply(report.samples)
        json.dumps(report.page.rows)

    return row(f"straggler view of {ranks} ranks", cpu_ms(view))


def page(nodes: int, per_node: int) -> Row:
    """Measure a scrape: everything that is shown for this many nodes."""
    registry, said = Registry(), _samples_of_a_node(per_node)
    for node in range(1, nodes):
        registry.apply_node(node, said)
    return row(f"metrics page, {len(registry.page()) // 1024} KiB", cpu_ms(registry.page))


def _samples_of_a_node(per_node: int) -> list[Any]:
    registry = Registry(node=1)
    for family in metrics.FAMILIES:
        if family.by_node and isinstance(family, Gauge):
            values = {name: of[0] if of else "0" for name, of in family.labels.items()}
            gpus = range(per_node) if "gpu" in values else (0,)
            registry.apply(
                [family.set(1.0, **{**values, **({"gpu": n} if "gpu" in values else {})}) for n in gpus]
            )
    return registry.node_samples()


def beats_of(node: int, per_node: int) -> list[Beat]:
    ranks = range(node * per_node, (node + 1) * per_node)
    return [
        Beat(
            rank=rank,
            step=100,
            activity="train",
            phase="forward",
            quiet=0.1,
            limit=60.0,
            hang=10.0,
            trained=True,
            waiting=False,
            node=node,
            node_name=f"node{node}",
        )
        for rank in ranks
    ]


def pulse(nodes: int, per_node: int) -> list[Row]:
    """Measure how node 0 reads the other nodes' heartbeats and judges them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    client = TCPStore("127.0.0.1", store.port, is_master=False)
    registry, said = Registry(), pack_samples(_samples_of_a_node(per_node))
    watchdog, others = Watchdog(0, "node0", store.port, lambda: client, registry), range(1, nodes)
    watchdog.begin_generation("g", {}, range(nodes))
    logging.getLogger("tandem.watchdog").setLevel(logging.ERROR)  # all words are told before one is read
    number = 0

    def tell() -> None:
        nonlocal number, said
        number += 1
        said = pack_samples([each._replace(value=float(number)) for each in _samples_of_a_node(per_node)])
        for node in others:
            words = _NodeBeats(number, [asdict(beat) for beat in beats_of(node, per_node)], time.time())
            store.set(f"g/pulse/{node}", json.dumps(asdict(words)))
            store.set(f"metrics/{node}", said)

    def read() -> float:
        tell()
        began = time.process_time()
        watchdog._read_others(client, "g", others, None)
        return 1e3 * (time.process_time() - began)

    def read_samples() -> float:
        tell()
        began = time.process_time()
        watchdog._read_samples(client, others[:NODES_AT_ONCE])
        return 1e3 * (time.process_time() - began)

    heard = statistics.median(read() for _ in range(CALLS))
    samples = statistics.median(read_samples() for _ in range(CALLS))
    judged = cpu_ms(lambda: watchdog._look(time.monotonic()))
    everybody = [beat for node in range(nodes) for beat in beats_of(node, per_node)]
    hung = [beat.later(100.0, 100.0, halted=False) for beat in everybody]
    hung = [type(beat)(**{**vars(beat), "waiting": True}) for beat in hung]
    return [
        row(f"heartbeats of {nodes} nodes read and checked", heard, WATCHDOG_TICK_SECONDS),
        row(
            f"metrics of {len(others[:NODES_AT_ONCE])} nodes read and applied",
            samples,
            WATCHDOG_TICK_SECONDS,
        ),
        row(f"{len(everybody)} ranks checked by the watchdog", judged, WATCHDOG_TICK_SECONDS),
        row(f"a hang among {len(hung)} ranks identified", cpu_ms(lambda: find_hung_rank(hung))),
    ]


def rendezvous(nodes: int) -> Row:
    """Measure a keep-alive of node 0: the shared state of torch's rendezvous, read and written once."""
    state, now = _RendezvousState(), datetime.now(UTC)
    for index in range(nodes):
        node = _NodeDesc(f"{index:06d}.node{index}", 1000, index)
        state.participants[node], state.last_heartbeats[node] = index, now
    state.complete = True
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    backend = WatchfulBackend(store, LastCall(60, 1), lambda: None)
    backend.set_state(pickle.dumps(state))

    def beat() -> None:
        bits, token = backend.get_state()
        backend.set_state(bits, token)

    kib = len(store.get(STATE_KEY)) // 1024
    seconds = poll_intervals(nodes).alive_seconds
    return row(f"keep-alive in a rendezvous of {nodes}, {kib} KiB", cpu_ms(beat), seconds)


def sampler(samples: int) -> list[Row]:
    """Measure how each rank computes its samples of the next steps, from any step of the run."""
    target, places = f"at most {LIMIT_MS:g} ms and 1 MB", slice(None)
    found = []
    for place, step in (("first step", 0), ("step 10,000,000", 10_000_000)):
        ms = cpu_ms(lambda step=step: _new_order(samples).indices(step, places))
        held = _peak_bytes(samples, step, places)
        said = f"{ms:.2f} ms, {held / 1e6:.2f} MB"
        row_of_place = Row(
            f"{place} of an order of {samples:,} samples",
            CALLS,
            said,
            target=target,
            passed=ms <= LIMIT_MS and held <= 1e6,
            seconds=ms / 1000,
        )
        found.append(row_of_place)
    return [*found, *(_each_step(samples, share) for share in (64, 256, 1024))]


def _new_order(samples: int) -> GlobalOrder:
    return GlobalOrder(samples, 256, seed=0)


def _peak_bytes(samples: int, step: int, places: slice) -> int:
    """Return the peak memory of an order from its start to its first step, in NumPy's arrays."""
    tracemalloc.start()
    order = _new_order(samples)
    order.indices(step, places)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most + (order._cached[1].nbytes if order._cached else 0)


def _each_step(samples: int, share: int) -> Row:
    """Run steps one after another; every few of them compute the next ones."""
    order, steps = GlobalOrder(samples, share, seed=0), 10 * STEPS_AT_ONCE
    ms = cpu_ms(lambda: [order.indices(step, slice(None)) for step in range(steps)]) / steps
    return Row(
        f"samples of each further step, {share:,} on a rank",
        CALLS,
        f"{ms:.4f} ms, {1e6 * ms / share:.0f} ns per sample",
        ratio=f"{ms / 5:.2%} of a step of 5 ms",
        target="at most 1%",
        passed=ms <= 0.05,
        seconds=ms / 1000,
    )


def rows(ranks: int, per_node: int, samples: int, only: str | None = None) -> list[Row]:
    torch.set_num_threads(1)
    if only == "order":
        return sampler(samples)
    nodes = ranks // per_node
    found = [placement(nodes), consensus(ranks), stragglers(ranks, per_node), page(nodes, per_node)]
    found += [*pulse(nodes, per_node), rendezvous(nodes)]
    return found + sampler(samples)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--samples", type=int, default=100_000_000)
    parser.add_argument("--only", choices=["order"], help="of the samples, and nothing of ranks and nodes")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    asked = parser.parse_args()
    table = rows(asked.ranks, asked.per_node, asked.samples, asked.only)
    return finish(table, asked.json)


if __name__ == "__main__":
    sys.exit(main())
