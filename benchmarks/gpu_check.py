"""Check tandem on a real GPU in at most ten minutes: that it works and resumes exactly, and what it costs.

    make gpu-check                 # or: python benchmarks/gpu_check.py [--only digits killed] [--seconds 570]

The checks are the functions in CHECKS, the most important ones first. Each has its own time limit, and a
failure does not stop the others. A check that is not reached in time, or that needs a GPU when there is none,
is reported as "not measured". Without a GPU, checks that do not measure speed run on a simulated GPU
(tests/played_gpu.py). The exit code is 1 if a check has failed. The cost is relative to a bare loop.
"""

import argparse
import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

import played_gpu  # noqa: E402
from gpu_tasks import TIMES  # noqa: E402
from live_runs import LiveRun, session_of  # noqa: E402
from table import Row, finish  # noqa: E402

TASKS = ROOT / "benchmarks" / "gpu_tasks.py"
QUIET = ("--metrics", 0, "--metrics-linger", 0, "--progress", "off", "--eval-every", "never")
EXPECTED_WAITS = {"distributed/consensus.py:drain", "data/fetch.py:fetch"}
"""Reads that wait for nothing: the previous step's numbers are on the host, and the index is on the CPU."""
HOST_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")


class Check(NamedTuple):
    """Run checks on a simulated or a real GPU, below a directory, until a deadline (monotonic)."""

    played: bool
    folder: Path
    deadline: float

    @property
    def launcher(self) -> tuple[str, ...]:
        """The module to run as tandem, and its verb."""
        return ("played_gpu" if self.played else "tandem", "launch")

    def run(self, name: str, *words: object, limit: float = 150.0, **environ: str) -> tuple[Path, str]:
        """Run `tandem launch` to its end in its own directory; return its run directory and output.

        Raises RuntimeError if it fails or takes more than `limit` seconds.
        """
        run_dir = self.folder / name
        command = [sys.executable, "-m", *self.launcher, *QUIET, "--run-dir", run_dir, *words]
        return run_dir, self.output([str(word) for word in command], limit, **environ)

    def output(self, command: Sequence[str], limit: float, **environ: str) -> str:
        """Return the output of a command, and end all its processes with it. Raises RuntimeError as `run`."""
        left = self.deadline - time.monotonic()
        if not self.played:  # a CPU that plays a GPU may be busy with anything
            left = min(limit, left)
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **environ},
        )
        try:
            said, _ = process.communicate(timeout=max(1.0, left))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            print(said, file=sys.stderr)
            raise RuntimeError(f"ended after {left:.0f} s: {_end(said)}") from None
        if process.returncode != 0:
            print(said, file=sys.stderr)
            raise RuntimeError(f"ended with {process.returncode}: {_end(said)}")
        return said


def _end(said: str) -> str:
    return " / ".join(line.strip() for line in said.strip().splitlines()[-3:])[-500:]


def _summary(run_dir: Path) -> dict[str, object]:
    return dict(json.loads((run_dir / "summary.json").read_text()))


def doctor(check: Check) -> list[Row]:
    """Check what `tandem doctor` reports about the GPU and its driver."""
    said = check.output([sys.executable, "-m", "tandem", "doctor"], 60.0)
    lines = dict(line.split(maxsplit=1) for line in said.splitlines() if line.startswith(("GPUs", "driver")))
    seen = f"GPUs {lines['GPUs']}; driver {lines['driver']}"
    return [Row("doctor", 1, seen, passed=None if check.played else not lines["GPUs"].startswith("none"))]


def digits(check: Check) -> list[Row]:
    """Run the default task on the GPU and on the CPU, with the same seed."""
    words = ("--nproc", 1, "--task", "digits", "--steps", 60 if check.played else 500, "--log-every", 20)
    found = []
    for device in ("cuda", "cpu"):
        run_dir, said = check.run(f"digits-{device}", *words, "--device", device)
        if f"({device})" not in said:
            raise RuntimeError(f"not on {device}: {_end(said)}")
        found.append(float(str(_summary(run_dir)["loss"])))
    near = abs(found[0] - found[1]) <= 0.1 * found[1] + 0.01
    end = f"loss {found[0]:.4f} in the last interval"
    return [Row("digits on one GPU", 1, end, f"on the CPU {found[1]:.4f}", target="within 10%", passed=near)]


def killed(check: Check) -> list[Row]:
    """Run without a fault and with a killed rank: compare the weights, and measure the recovery."""
    steps, width, kills, every = (120, 8, 1, 20) if check.played else (4000, 64, 2, 200)
    words = (*QUIET, "--nproc", 1, "--task", f"{TASKS}:ConvBySample", "--task.width", width)
    words = (*words, "--workers", 2, "--batch-size", 32)
    words = (*words, "--steps", steps, "--device", "cuda", "--deterministic", "--checkpoint-every", every)
    calm, _ = check.run("calm", *words)
    seconds = []
    with LiveRun(check.launcher, check.folder / "killed", *words) as run:
        for number in range(kills):
            run.until(lambda number=number: len(run.events("training")) > number, "first step")
            run.until(lambda: bool(run.events("checkpoint")), "checkpoint")
            time.sleep(random.uniform(0.0, 0.2))
            at = time.time()
            os.kill(run.ranks()[0], signal.SIGKILL)
            run.until(lambda number=number: len(run.events("training")) > number + 1, "next generation")
            seconds.append(run.events("training")[number + 1]["time"] - at)
        code = run.wait(max(1.0, check.deadline - time.monotonic()))
    summary = run.summary()
    was_killed = code == 0 and summary["restarts"] == kills
    same = was_killed and _summary(calm)["weights_sha256"] == summary["weights_sha256"]
    weights = (
        "the undisturbed run's bits" if same else "other weights" if was_killed else f"ended with {code}"
    )
    median = statistics.median(seconds)
    recovery = Row("from the kill to the next step", kills, f"median {median:.2f} s")
    return [
        Row("a rank killed, --workers 2", kills, weights, target="the same bits", passed=same),
        recovery if not check.played else _not_measured("from the kill to the next step"),
    ]


def recovery_beside_torchrun(check: Check) -> list[Row]:
    """Measure recovery under `tandem launch`, also with `--warm-gpu`, and under torchrun.

    All use the same trainer and task, and save every 50 steps.
    """
    words = ("--device", "cuda", "--checkpoint-every", 50, "--steps", 10_000_000, "--log-every", 1000)
    torchrun = "torch.distributed.run --nproc-per-node 1 --max-restarts 9 -m tandem train".split()
    tandem = (*check.launcher, "--nproc", "1")
    medians, free = list[float](), list[float]()
    for launcher, more in ((tandem, ()), (tandem, ("--warm-gpu",)), (torchrun, ())):
        with LiveRun(launcher, check.folder / f"recovery-{len(medians)}", *words, *more) as run:
            taken = []
            for number in (1, 2, 3):
                run.until(lambda number=number: len(run.events("training")) >= number, "first step")
                if launcher is tandem:
                    run.until(lambda: _stands_by(run), "process that stands by")
                time.sleep(random.uniform(0.5, 1.0))
                free.append(torch.cuda.mem_get_info()[0] / 2**20)
                pid = run.ranks()[0] if launcher is tandem else run.workers()[0]
                at = time.time()
                os.kill(pid, signal.SIGKILL)
                run.until(lambda number=number: len(run.events("training")) > number, "next generation")
                taken.append(run.events("training")[number]["time"] - at)
            medians.append(statistics.median(taken))
    ours, opened, theirs = medians
    held = statistics.median(free[:3]) - statistics.median(free[3:6])

    return [
        Row(
            "a killed rank, to the next step",
            3,
            f"median {ours:.2f} s",
            f"torchrun {theirs:.2f} s",
            f"{ours / theirs:.2f}",
            "at most 0.5",
            ours <= 0.5 * theirs,
            3,
            ours,
            theirs,
        ),
        Row(
            f"the same, --warm-gpu (holds {held:,.0f} MiB)",
            3,
            f"median {opened:.2f} s",
            f"without {ours:.2f} s",
            f"{opened / ours:.2f}",
            passed=None,
            control_trials=3,
            seconds=opened,
            control_seconds=ours,
        ),
    ]


def _stands_by(run: LiveRun) -> bool:
    return "tandem-standby" in (name for _, name in session_of(run.process.pid))


def verified(check: Check) -> list[Row]:
    """Run `tandem verify-resume`, which sets --deterministic on GPUs."""
    words = ("--nproc", "1", "--task", f"{TASKS}:Conv", "--batch-size", "32", "--trials", "3")
    said = check.output([sys.executable, "-m", "tandem", "verify-resume", *words, "--device", "cuda"], 150.0)
    outcome = said.strip().splitlines()[-1]
    return [Row("verify-resume", 3, outcome, target="exact", passed="verdict: exact" in outcome)]


def two_ranks(check: Check, strategy: str = "ddp") -> list[Row]:
    """Run two nodes with one rank each on one GPU, without a fault and with a killed rank.

    This tests NCCL between ranks, and its errors. NCCL refuses two ranks that use one GPU of one host, so
    each node gets another host name. Each node is a separate launch, for which the GPU is the first one.
    """
    steps, width = (40, 8) if check.played else (800, 64)
    words = ["--task", f"{TASKS}:Conv", "--task.width", width, "--batch-size", 32, "--steps", steps]
    words += ["--device", "cuda", "--deterministic", "--checkpoint-every", 20, "--nodes", 2, "--nproc", 1]
    words += ["--strategy", strategy]
    found, restarts = list[object](), list[object]()
    for kills in (0, 1):
        run_dir, nodes = check.folder / f"{strategy}-{kills}", list[LiveRun]()
        with contextlib.ExitStack() as opened, socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = ("--master", f"127.0.0.1:{free.getsockname()[1]}", "--run-dir", run_dir)
            free.close()
            for node in (0, 1):
                folder, more = check.folder / f"{strategy}-{kills}-{node}", (*place, "--node-rank", node)
                variables = {"NCCL_HOSTID": f"node-{node}"}
                run = LiveRun(check.launcher, folder, *QUIET, *words, *more, variables=variables)
                nodes.append(opened.enter_context(run))
            nodes[0].run_dir = run_dir
            if kills:
                nodes[0].until(lambda run=nodes[0]: bool(run.events("checkpoint")), "checkpoint")
                os.kill(nodes[1].ranks()[1], signal.SIGKILL)
            for run in nodes:
                if code := run.wait(max(1.0, check.deadline - time.monotonic())):
                    print(run.words(), file=sys.stderr)
                    raise RuntimeError(f"a node ended with {code}: {_end(run.words())}")
        found.append(_summary(run_dir)["weights_sha256"])
        restarts.append(_summary(run_dir)["restarts"])
    same = found[0] == found[1] and restarts == [0, 1]
    said = "the undisturbed run's bits" if same else f"other weights, or restarts: {restarts}"
    name = f"two ranks on one GPU, {strategy}, one killed"
    return [Row(name, 1, said, target="the same bits", passed=same)]


def branches(check: Check) -> list[Row]:
    """Run fp16 with clipping, and a layer that is frozen in the first epoch: other paths of the optimizer."""
    rows = []
    for name, task, more in (
        ("fp16, --clip-norm", "Conv", ("--precision", "fp16", "--clip-norm", 1)),
        ("a task with freeze()", "Frozen", ()),
    ):
        words = ("--nproc", 1, "--task", f"{TASKS}:{task}", "--task.width", 8, "--batch-size", 32)
        words = (*words, "--steps", 40, "--device", "cuda", *more)
        run_dir, _ = check.run(f"branch-{task}", *words)
        loss = float(str(_summary(run_dir)["loss"]))
        rows.append(Row(name, 1, f"loss {loss:.4f}", target="finite", passed=math.isfinite(loss)))
    return rows


def synchronizations(check: Check) -> list[Row]:
    """Count how often a step makes the host wait for the device."""
    steps = 40
    words = ("--nproc", 1, "--task", f"{TASKS}:Conv", "--batch-size", 32, "--steps", 3 * steps)
    words = (
        *words,
        "--task.width",
        8,
        "--log-every",
        steps,
        "--checkpoint-every",
        "never",
        "--device",
        "cuda",
    )
    if check.played:
        notes = check.folder / "notes"
        os.environ["PLAYED_GPU_NOTES"] = str(notes)
        check.run("synchronizations", *words)
        found = played_gpu.noted(notes).counts["wait"]
        waits = Counter({place: n for place, n in found.items() if place not in EXPECTED_WAITS})
        each = sum(count for count in waits.values() if count >= 3 * steps) / (3 * steps)
        worst = ", ".join(place for place, count in waits.most_common(3) if count >= 3 * steps)
    else:
        run_dir, _ = check.run("synchronizations", *words, "--profile", f"{steps + 5}:{steps - 10}")
        trace = json.loads((run_dir / "profile" / "rank-0.json").read_text())["traceEvents"]
        launched = max(event["ts"] for event in trace if "LaunchKernel" in event.get("name", ""))
        waits = [event for event in trace if event.get("name") in HOST_WAITS]
        # what comes after the last kernel is the profiler's own
        found = Counter(event["name"] for event in waits if event["ts"] < launched)
        each, worst = sum(found.values()) / (steps - 10), str(dict(found)) if found else ""
    said = f"{each:.2f} a step{f' ({worst})' if worst else ''}{', on the played GPU' if check.played else ''}"
    return [Row("waits of the host for the device", 1, said, target="0", passed=each == 0)]


def snapshots(check: Check) -> list[Row]:
    """Measure what snapshots cost: a text model with 1.5 GB of AdamW state, with and without them.

    The model's own clock measures the steps, because tandem's samples per second exclude snapshots and saves.
    The measured steps come after the first snapshot, which allocates memory, and include several snapshots.
    """
    scale, batch, first, last, rounds = ("tiny", 2, 2, 5, 1) if check.played else ("full", 16, 160, 560, 2)
    words = ["--nproc", 1, "--task", f"{TASKS}:Gpt124m", "--task.scale", scale, "--batch-size", batch]
    words += ["--task.first", first, "--task.last", last, "--steps", last, "--device", "cuda"]
    words += ["--precision", "auto", "--checkpoint-every", "never", "--log-every", 50]
    name = f"snapshots of {'the tiny model' if check.played else '124M parameters'}"
    times: dict[str, list[float]] = {"auto": [], "never": []}
    interval: float | None = None
    for number in range(rounds):
        for every in ("auto", "never") if number % 2 else ("never", "auto"):
            run_dir, noted = check.folder / f"snapshots-{every}-{number}", check.folder / "times.txt"
            check.run(run_dir.name, *words, "--snapshot-every", every, **{TIMES: str(noted)})
            times[every].append(float(noted.read_text()) / 1000)
            kept = _gauge(run_dir, "tandem_snapshot_step")
            if kept != (last if every == "auto" else None):
                raise RuntimeError(f"--snapshot-every {every} ended with the state of step {kept} in memory")
        interval = _gauge(check.folder / f"snapshots-auto-{number}", "tandem_snapshot_interval_seconds")
    if check.played:
        return [Row(name, rounds, f"the state of step {last} is in memory, without snapshots none is")]
    ours, theirs = statistics.median(times["auto"]), statistics.median(times["never"])
    cost = statistics.median(a / b for a, b in zip(times["auto"], times["never"], strict=True)) - 1
    said = f"step {ours * 1000:.2f} ms, a snapshot every {interval or 0:.1f} s"
    control = f"without {theirs * 1000:.2f} ms"
    met = cost <= 0.01
    return [Row(name, rounds, said, control, f"{cost:+.1%}", "at most 1%", met, rounds, ours, theirs)]


def _gauge(run_dir: Path, name: str) -> float | None:
    """Return the last value of a metric, with its first label, or None."""
    lines = (run_dir / "metrics.prom").read_text().splitlines()
    return next((float(line.split()[-1]) for line in lines if re.match(name + "[ {]", line)), None)


def beside_bare_loops(
    check: Check, scale: str = "full", device: str = "cuda", rounds: int = 2, *, names: Sequence[str]
) -> list[Row]:
    """Compare a step of ResNet-50 and a 124M GPT in bf16 with a bare loop without a framework."""
    compiled = device == "cuda" and any(map(shutil.which, ("cc", "gcc", "clang")))
    of = {"Resnet50": ("Resnet50", 128, ("--channels-last",)), "Gpt124m": ("Gpt124m", 16, ())}
    rows = []
    for name, batch, more in (of[each] for each in names):
        if name == "Resnet50" and not _has_torchvision():
            rows.append(_not_measured("a step of Resnet50", "torchvision is not here"))
            continue
        batch = batch if scale == "full" else {"Resnet50": 4, "Gpt124m": 2}[name]
        steps = 120 if scale == "full" else 5
        words = ["launch", *QUIET, "--nproc", 1, "--task", f"{TASKS}:{name}", "--task.scale", scale]
        words += ["--batch-size", batch, "--steps", steps, "--precision", "auto", "--device", device]
        # The cost of snapshots has a row of its own.
        words += ["--checkpoint-every", "never", "--snapshot-every", "never", *more]
        words += ["--compile"] if compiled else []
        alone = ["--scale", scale, "--device", device, *(["--compile"] if compiled else [])]
        ours, theirs = [], []
        for number in range(rounds):
            times = check.folder / f"{name}-{number}.txt"
            run_dir = ["--run-dir", check.folder / f"{name}-{number}"]
            theirs.append(float(check.output([sys.executable, str(TASKS), name, *alone], 200.0).split()[-1]))
            command = [sys.executable, "-m", "tandem", *map(str, [*words, *run_dir])]
            check.output(command, 200.0, **{TIMES: str(times)})
            ours.append(float(times.read_text()))
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        rows.append(
            Row(
                f"a step of {name}, {batch} samples, {'compiled' if compiled else 'not compiled'}",
                rounds,
                f"{statistics.median(ours):.2f} ms",
                f"bare loop, batch on the device {statistics.median(theirs):.2f} ms",
                f"{ratio:.3f}",
                "at most 1.00",
                ratio <= 1.005,
                rounds,
                statistics.median(ours) / 1000,
                statistics.median(theirs) / 1000,
            )
        )
    return rows


def graphs(check: Check) -> list[Row]:
    """Run the compiled default task with and without CUDA graphs: speed, and equal losses."""
    rates, losses = [], []
    for mode in ("reduce-overhead", "default"):
        words = ("--nproc", 1, "--task", "digits", "--steps", 400, "--compile", mode)
        summary = _summary(check.run(f"graphs-{mode}", *words)[0])
        rates.append(float(str(summary["samples_per_second"])))
        losses.append(float(str(summary["loss"])))
    apart = abs(losses[0] - losses[1])
    said, control = f"{rates[0]:,.0f} samples/s", f"without graphs {rates[1]:,.0f} samples/s"
    ratio, target = f"{rates[0] / rates[1]:.2f}", "the loss of both within 0.01"
    return [Row("digits, --compile reduce-overhead", 1, said, control, ratio, target, apart <= 0.01)]


def _has_torchvision() -> bool:
    try:
        import torchvision  # type: ignore[import-untyped]  # noqa: F401
    except (ImportError, RuntimeError, OSError):
        return False
    return True


def _not_measured(name: str, why: str = "needs a GPU") -> Row:
    return Row(name, 0, f"not measured: {why}", passed=None)


# Name -> what makes its rows, and whether a played GPU will do.
CHECKS: dict[str, tuple[Callable[[Check], list[Row]], bool]] = {
    "doctor": (doctor, True),
    "digits": (digits, True),
    "killed": (killed, True),
    "two-ranks": (two_ranks, True),
    "two-ranks-fsdp": (partial(two_ranks, strategy="fsdp"), False),
    "branches": (branches, True),
    "synchronizations": (synchronizations, True),
    "verify-resume": (verified, False),
    "recovery": (recovery_beside_torchrun, False),
    "graphs": (graphs, False),
    "gpt124m": (partial(beside_bare_loops, names=["Gpt124m"]), False),
    "resnet50": (partial(beside_bare_loops, names=["Resnet50"]), False),
    "snapshots": (snapshots, True),
}


def rows_of(names: Sequence[str], played: bool, seconds: float) -> list[Row]:
    """Return the rows of some checks; a check that fails becomes a row with the reason."""
    table: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-check-") as folder:
        os.environ.update(played_gpu.environment(Path(folder) / "notes") if played else _environment())
        check = Check(played, Path(folder), time.monotonic() + seconds)
        for name in names:
            make, can_be_played = CHECKS[name]
            if played and not can_be_played:
                table.append(_not_measured(name))
                continue
            if time.monotonic() > check.deadline - 15:
                table.append(_not_measured(name, f"the {seconds:.0f} s were over"))
                continue
            began = time.monotonic()
            try:
                table += make(check)
            except (RuntimeError, OSError, subprocess.SubprocessError, LookupError, ValueError) as error:
                table.append(
                    Row(name, 1, f"failed: {' / '.join(str(error).split(chr(10)))[-600:]}", passed=False)
                )
            took = time.monotonic() - began
            print(f"{name} ({took:.0f} s): {table[-1].outcome}", file=sys.stderr, flush=True)
    return table


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path.rstrip(os.pathsep)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--seconds", type=float, default=570.0, help="for all of it")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    asked = parser.parse_args()
    played = torch.cuda.device_count() == 0
    if played:
        print("no GPU here: one is played by the CPU, and nothing is said of speed", file=sys.stderr)
    table = rows_of(asked.only, played, asked.seconds)
    return finish(table, asked.json)


if __name__ == "__main__":
    sys.exit(main())
