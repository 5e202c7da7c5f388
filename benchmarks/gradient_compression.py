#!/usr/bin/env python3
"""When does a compressed gradient pay? `python benchmarks/gradient_compression.py` (root, for the network).

Two machines as network namespaces with a cable between them, each with one rank of `tandem launch` on
wide_model.py. The cable has a token bucket at each end (tc tbf). For each rate every compression trains the
same model; what is compared is the time of a step, as a ratio to uncompressed gradients at the same rate in
the same round. Rounds take turns; the median of the rounds counts. Prints one table.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
KINDS = ("none", "bf16", "fp16", "powersgd")
RATES = ("", "1gbit", "100mbit")
STEPS, LOG_EVERY = 24, 6
LIMIT_SECONDS = 300
BUCKET = "burst 64kb latency 200ms"


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


class Cable:
    """Two network namespaces of this process alone; 10.78.0.1 and 10.78.0.2 at the ends."""

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


def measure(cable: Cable, kind: str, width: int, folder: Path) -> tuple[float, int]:
    """(milliseconds, gradient bytes) of a step; without the first interval."""
    flags = (
        f"--steps {STEPS} --log-every {LOG_EVERY} --batch-size 24 --threads 1 --device cpu --eval-every never"
    )
    flags += " --checkpoint-every never --snapshot-every never --metrics-linger 0 --metrics-port 0 --nodes 2"
    task = ("--task", f"{HERE / 'wide_model.py'}:Wide", "--task.width", str(width))
    processes = []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    for number, machine in enumerate(cable.machines):
        words = [
            "ip",
            "netns",
            "exec",
            machine,
            sys.executable,
            "-m",
            "tandem",
            "launch",
            *flags.split(),
            *task,
        ]
        words += ["--master", "10.78.0.1:29555", "--node-rank", str(number), "--run-dir", str(folder)]
        words += ["--gradient-compression", kind]
        environment = {
            **environment,
            "GLOO_SOCKET_IFNAME": "cable",
            "TANDEM_STATE_DIR": f"{folder}-state-{number}",
        }
        with open(f"{folder}-{number}.log", "w") as log:
            processes.append(
                subprocess.Popen(
                    words, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            )
    try:
        codes = [process.wait(timeout=LIMIT_SECONDS) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    if any(codes):
        raise SystemExit(f"{kind} ended with {codes}:\n{Path(f'{folder}-0.log').read_text()[-3000:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [sum(line["phases"].values()) / LOG_EVERY for line in lines if "phases" in line]
    page = (folder / "metrics.prom").read_text()
    found = re.search(r"^tandem_gradient_sync_bytes_total(?:\{[^}]*\})? (\S+)", page, re.MULTILINE)
    return 1000 * statistics.median(times[1:]), round(float(found[1]) / STEPS) if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=1400)
    parser.add_argument("--rates", default=",".join(RATES), help="comma-separated; an empty one is no limit")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gradient_compression.json")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="tandem-compression-") as place, Cable() as cable:
        for rate in given.rates.split(","):
            cable.limit(rate)
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
            sent = {}
            for turn in range(given.rounds):
                for kind in KINDS:
                    folder = Path(place) / f"{rate or 'open'}-{turn}-{kind}"
                    milliseconds, sent[kind] = measure(cable, kind, given.width, folder)
                    times[kind].append(milliseconds)
                    ratios[kind].append(milliseconds / times["none"][-1])
                    print(
                        f"{rate or 'open'} {turn} {kind}: {milliseconds:.1f} ms", file=sys.stderr, flush=True
                    )
            for kind in KINDS:
                rows.append(
                    {
                        "rate": rate or "no limit",
                        "compression": kind,
                        "bytes_a_step": sent[kind],
                        "step_ms": round(statistics.median(times[kind]), 1),
                        "ratio": round(statistics.median(ratios[kind]), 2),
                        "ratios": [round(ratio, 3) for ratio in ratios[kind]],
                    }
                )
    print("| rate | compression | bytes a step | step, ms | to none |\n|---|---|---|---|---|")
    for row in rows:
        print("| {rate} | {compression} | {bytes_a_step:,} | {step_ms} | {ratio} |".format(**row))
    given.output.parent.mkdir(exist_ok=True)
    given.output.write_text(json.dumps({"width": given.width, "steps": STEPS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
