"""`tandem bench --compare single,dp,ddp,fsdp`: train a task under each strategy and compare the results.

Each result is from a real `tandem launch`; they run one after another. Each round has one run per strategy
and begins with a different one, so that background load affects all strategies equally. Ratios compare runs
of the same round.
"""

import json
import platform
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem import layout
from tandem.config import SETTINGS, Settings
from tandem.config.fields import words_in
from tandem.config.slices import ONE_PROCESS
from tandem.errors import FAILED, FINISHED, ConfigError, RunFailedError
from tandem.signals import StopFlag
from tandem.telemetry.journal import write_json_atomic
from tandem.text import did_you_mean, nearest
from tandem.verify.watched_run import WatchedRun, rank_processes

ROUNDS = 3
STEPS = 120
"""A run's samples/s exclude its first 20 steps."""
# The smallest number of ranks that exchange gradients.
CPU_RANKS = 2
LOG_LINES = 10
PEAK = re.compile(r"^tandem_torch_memory_peak_bytes\{[^}]*\} (\S+)", re.MULTILINE)
MIB = 2**20

Say = Callable[[str], None]


@dataclass
class Mode:
    """A strategy, its ranks, and its results by round; `problem`: why it has no results."""

    name: str
    ranks: int
    problem: str = ""
    samples_per_second: list[float] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)  # the highest peak of any rank or GPU
    losses: list[float] = field(default_factory=list)  # means over log intervals of the last round

    def as_json(self, reference: "Mode | None") -> dict[str, Any]:
        rates = self.samples_per_second
        return {
            "strategy": self.name,
            "ranks": self.ranks,
            "problem": self.problem or None,
            "samples_per_second": rates,
            "ratio": self.ratio(reference),
            "memory_bytes": self.memory_bytes,
            "losses": self.losses,
            "loss_difference": self.loss_difference(reference),
        }

    def ratio(self, reference: "Mode | None") -> float | None:
        """Return the median over rounds of its samples/s divided by the reference's."""
        if reference is None or not self.samples_per_second:
            return None
        # A strategy that failed in a later round has fewer rates, and all lists begin with round 1.
        pairs = zip(self.samples_per_second, reference.samples_per_second, strict=False)
        return round(statistics.median(ours / theirs for ours, theirs in pairs), 3)

    def loss_difference(self, reference: "Mode | None") -> float | None:
        """Return the largest difference of a logged loss from the reference's."""
        if reference is None or not self.losses:
            return None
        return max(abs(ours - theirs) for ours, theirs in zip(self.losses, reference.losses, strict=False))


@dataclass(frozen=True)
class BenchOptions:
    """The options on the command line."""

    names: list[str]
    rounds: int = ROUNDS
    output: Path | None = None

    @classmethod
    def of(cls, compare: str | None, rounds: int | None, output: Path | None) -> "BenchOptions":
        """Create from the command line's words. Raises ConfigError."""
        known = list(words_in(SETTINGS["strategy"].annotation))
        names = list(dict.fromkeys(compare.split(","))) if compare is not None else known
        for name in names:
            if name not in known:
                hint = did_you_mean(nearest(name, known))
                raise ConfigError(f"--compare: invalid value {name!r}; expected {', '.join(known)}{hint}")
        if output is not None and not output.absolute().parent.is_dir():
            raise ConfigError(f"--output {output}: directory {output.absolute().parent} does not exist")
        return cls(names, rounds or ROUNDS, output)


def modes_of(names: Sequence[str], settings: Settings, gpus: int) -> list[Mode]:
    """Return the modes to run: one process for single and dp, else `--nproc` ranks. Raises ConfigError."""
    if settings.launch.nodes not in (None, 1):
        raise ConfigError(
            f"--nodes is {settings.launch.nodes}: bench compares on this machine only; use --nproc"
        )
    asked = settings.launch.nproc
    ranks = int(asked) if asked != "auto" else gpus or CPU_RANKS
    modes = []
    for name in names:
        mode = Mode(name, 1 if name in ONE_PROCESS else ranks)
        if name == "dp" and gpus < 2:
            mode.problem = f"nn.DataParallel needs two GPUs, but torch sees {gpus}"
        elif name != "ddp" and settings.exchange.gradient_compression != "none":
            mode.problem = "--gradient-compression works only with ddp"
        elif gpus and mode.ranks > gpus:
            mode.problem = (
                f"{mode.ranks} ranks need {mode.ranks} GPUs, but torch sees {gpus}; --device cpu has no limit"
            )
        modes.append(mode)
    return modes


def compare(
    settings: Settings, arguments: Sequence[str], environ: Mapping[str, str], options: BenchOptions, say: Say
) -> tuple[int, dict[str, Any]]:
    """Run all modes and print a table; return (0, or 1 if a run failed; all values).

    Raises ConfigError and StoppedError.
    """
    gpus = gpus_for(settings)
    rounds = options.rounds
    stop = StopFlag().install()
    modes = modes_of(options.names, settings, gpus)
    steps = settings.run.steps or STEPS
    device = f"{gpus} GPUs" if gpus else "CPU"
    batch_size = settings.data.batch_size
    say(f"bench: {settings.run.task}, {steps} steps of {batch_size} samples, {rounds} rounds, {device}")
    failed = False
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        for number in range(rounds):
            turn = number % len(modes)
            for mode in modes[turn:] + modes[:turn]:
                if mode.problem:
                    continue
                run_dir = Path(folder) / f"{mode.name}-{number}"
                try:
                    _run(mode, steps, run_dir, arguments, environ, stop)
                except RunFailedError as error:
                    mode.problem = f"failed: {error}"
                    # The other strategies can still be compared. The exit code reports the failure at the
                    # end.
                    failed = True
                    continue
                rate = mode.samples_per_second[-1]
                say(f"round {number + 1} of {rounds}: {mode.name}, {rate:,.0f} samples/s")
    say(table(modes, on_gpus=bool(gpus)))
    found = _report(settings, steps, rounds, device, modes)
    if options.output is not None:
        write_json_atomic(options.output, found)
    return FAILED if failed else FINISHED, found


def gpus_for(settings: Settings) -> int:
    """Return how many GPUs runs with these settings would use."""
    if settings.compute.device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def _run(
    mode: Mode,
    steps: int,
    run_dir: Path,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    stop: StopFlag,
) -> None:
    """Do one run and add its values to `mode`. Raises RunFailedError."""
    flags: dict[str, object] = {
        "--strategy": mode.name,
        "--nproc": mode.ranks,
        "--steps": steps,
        # About ten losses for each strategy, at the same steps, to compare them one by one.
        "--log-every": max(1, steps // LOG_LINES),
        # Evaluations and saves would take time from the measured steps, and a restart would add a pause.
        "--eval-every": "never",
        "--checkpoint-every": "never",
        "--resume": "never",
        "--max-restarts": 0,
        "--metrics": 0,
    }
    peaks: dict[int, int] = {}
    with WatchedRun(environ, run_dir, flags, arguments) as run:
        run.finish(stop, lambda session: _look(session, peaks))
    lines = (run_dir / layout.METRICS).read_text().splitlines()
    on_gpus = [int(float(value)) for value in PEAK.findall((run_dir / layout.METRICS_PAGE).read_text())]
    mode.losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    # torch counts memory only on GPUs, so a run on CPUs has no such metric.
    mode.memory_bytes.append(max(on_gpus or peaks.values(), default=0))
    mode.samples_per_second.append(json.loads((run_dir / layout.SUMMARY).read_text())["samples_per_second"])


def _look(session: int, peaks: dict[int, int]) -> None:
    """Update each rank's peak resident memory."""
    for rank, pid in rank_processes(session).items():
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:  # it has ended in the meantime
            continue
        # The kernel's high-water mark also counts a peak between two checks.
        found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
        if found:
            peaks[rank] = max(peaks.get(rank, 0), int(found[1]) * 1024)


def reference_of(modes: Sequence[Mode]) -> Mode | None:
    """Return the mode to compare with: the first that ran."""
    return next((mode for mode in modes if mode.samples_per_second and not mode.problem), None)


def table(modes: Sequence[Mode], on_gpus: bool) -> str:
    """Format one line per mode; samples/s are the median over rounds, with minimum and maximum."""
    reference = reference_of(modes)
    against = reference.name if reference else "-"
    holder = "GPU" if on_gpus else "rank"
    heads = ["strategy", "ranks", "samples/s", f"of {against}", f"MiB a {holder}", "last loss", "loss off by"]
    rows = [heads]
    for mode in modes:
        if mode.problem or not mode.samples_per_second:
            rows.append([mode.name, str(mode.ranks), mode.problem])
            continue
        rates = mode.samples_per_second
        rows.append(
            [
                mode.name,
                str(mode.ranks),
                f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})",
                f"{mode.ratio(reference):.2f}",
                f"{max(mode.memory_bytes) / MIB:,.0f}",
                f"{mode.losses[-1]:.4f}" if mode.losses else "-",
                f"{mode.loss_difference(reference):.1g}" if mode.losses else "-",
            ]
        )
    # The reason why a strategy has no results is one long cell, which must not widen a column.
    full = [row for row in rows if len(row) == len(heads)]
    widths = [max(len(row[column]) for row in full) for column in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    )


def _report(
    settings: Settings, steps: int, rounds: int, device: str, modes: Sequence[Mode]
) -> dict[str, Any]:
    import torch

    reference = reference_of(modes)
    return {
        "task": settings.run.task,
        "batch_size": settings.data.batch_size,
        "steps": steps,
        "rounds": rounds,
        "device": device,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "reference": reference.name if reference else None,
        "strategies": [mode.as_json(reference) for mode in modes],
    }
