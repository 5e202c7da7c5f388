#!/usr/bin/env python3
"""Measure when gradient compression pays off: `python benchmarks/gradient_compression.py` (needs root).

Two network namespaces, connected by a virtual cable, act as two machines with one rank each. At both ends of
the cable, a token bucket (tc tbf) limits the rate. The ranks train a copy of wide_model.py's model for each
compression, with tandem's strategy and step. The compressions take steps in turn, so a ratio compares medians
over the same seconds. The program prints one table and writes it as JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import refuse_changes, save

HERE = Path(__file__).parent
KINDS = ("none", "bf16", "fp16", "powersgd")
RATES = ("", "1gbit", "100mbit")
BATCH, WARM_UP = 24, 2
LIMIT_SECONDS = 300
BUCKET = "burst 64kb latency 200ms"


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


class Cable:
    """Two network namespaces of this process; the ends of the cable are 10.78.0.1 and 10.78.0.2."""

    def __init__(self) -> None:
        self.machines = [f"tandem-{os.getpid()}-{end}" for end in (0, 1)]

    def __enter__(self) -> "Cable":
        first, second = self.machines
        for machine in self.machines:
            run("ip", "netns", "add", machine)
        run(*f"ip link add cable netns {first} type veth peer name cable netns {second}".split())
        for number, machine in enumerate(self.machines, 1):
            run(*f"ip -n {machine} address add 10.78.0.{number}/24 dev cable".split())
            run(*f"ip -n {machine} link set lo up".split())
            run(*f"ip -n {machine} link set cable up".split())
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines:
            subprocess.run(["ip", "netns", "del", machine], capture_output=True)

    def limit(self, rate: str) -> None:
        for machine in self.machines:
            words = f"tc -n {machine} qdisc del dev cable root".split()
            subprocess.run(words, capture_output=True)
            if rate:
                run(*f"tc -n {machine} qdisc add dev cable root tbf rate {rate} {BUCKET}".split())


def train(rank: int, width: int, steps: int) -> dict[str, tuple[int, list[float]]]:
    """Return {compression: (bytes, milliseconds) of a step}, as one of the two ranks."""
    import torch

    sys.path.insert(0, str(HERE))
    from tandem.config import Settings
    from tandem.distributed import strategy as strategies
    from tandem.distributed.group import ProcessGroup
    from tandem.distributed.position import Connection, Position
    from tandem.tasks.base import TaskWithDefaults
    from tandem.telemetry.clock import Clock
    from tandem.telemetry.meter import Costs
    from tandem.training.step import Proposal, TrainStep
    from wide_model import Wide

    torch.set_num_threads(1)
    position = Position(rank=rank, world_size=2, nodes=2)
    connection = Connection(init="master", master=("10.78.0.1", 29555))
    world = ProcessGroup.open(position, connection, torch.device("cpu"), LIMIT_SECONDS)
    task, steppers, found = TaskWithDefaults(Wide(width)), {}, {}
    rows = task.build_datasets().train
    batch = rows.__getitems__(torch.arange(rank, BATCH, 2))
    for kind in KINDS:
        settings = Settings().replace(gradient_compression=kind, batch_size=BATCH)
        torch.manual_seed(0)
        strategy = strategies.load("ddp", world, settings.exchange)
        model = strategy.shard(task.build_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        made = settings.compute, settings.optimization, BATCH, 0, task, model, optimizer
        steppers[kind] = TrainStep(world, strategy, *made, Clock())
        steppers[kind].take_dry_step([batch], 0, Costs())
        found[kind] = strategy.sync_bytes(list(model.parameters())), []
    for step in range(WARM_UP + steps):
        for kind, train_step in steppers.items():
            world.sum([0.0])  # both begin together
            began = time.perf_counter()
            train_step.take([batch], step, Proposal())
            if step >= WARM_UP:
                found[kind][1].append(1000 * (time.perf_counter() - began))
    world.sum([0.0])
    return found


def measure(cable: Cable, width: int, steps: int, folder: Path) -> dict[str, tuple[int, list[float]]]:
    """Return the results of rank 0. Raises SystemExit with the ranks' output if one fails."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "cable"}
    ranks = []
    for rank, machine in enumerate(cable.machines):
        words = ["ip", "netns", "exec", machine, sys.executable, __file__, "--rank", str(rank)]
        words += ["--width", str(width), "--steps", str(steps), "--output", str(folder / str(rank))]
        ranks.append(subprocess.Popen(words, env=environment, start_new_session=True))
    try:
        codes = [rank.wait(timeout=LIMIT_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, 9)
                rank.wait()
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")
    return dict(json.loads((folder / "0").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=1400)
    parser.add_argument("--rates", default=",".join(RATES), help="comma-separated; an empty one is no limit")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gradient_compression.json")
    parser.add_argument("--rank", type=int, help="of the program itself: be one of the two ranks")
    given = parser.parse_args()
    if given.rank is not None:
        given.output.write_text(json.dumps(train(given.rank, given.width, given.steps)))
        sys.stdout.flush()
        os._exit(0)
    refuse_changes(given.output)
    rows = []
    with tempfile.TemporaryDirectory(prefix="tandem-compression-") as place, Cable() as cable:
        for rate in given.rates.split(","):
            cable.limit(rate)
            found = measure(cable, given.width, given.steps, Path(place))
            plain = statistics.median(found["none"][1])
            for kind, (sent, times) in found.items():
                step = statistics.median(times)
                row = {
                    "rate": rate or "no limit",
                    "compression": kind,
                    "bytes": sent,
                    "step_ms": round(step, 1),
                }
                rows.append({**row, "ratio": round(step / plain, 2), "all_ms": [round(t, 1) for t in times]})
    print("| rate | compression | bytes a step | step, ms | to none |\n|---|---|---|---|---|")
    for row in rows:
        print("| {rate} | {compression} | {bytes:,} | {step_ms} | {ratio} |".format(**row))
    save({"width": given.width, "steps": given.steps, "rows": rows}, given.output)


if __name__ == "__main__":
    main()
