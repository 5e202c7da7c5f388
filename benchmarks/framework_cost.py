"""Measure the time of a step with tandem, Accelerate and Lightning, relative to a bare DDP script, on CPUs.

    python benchmarks/framework_cost.py [--rounds 9] [--steps 300] [--only own-loop launched] \\
        [--json benchmarks/results/framework_cost.json]

Two ranks train the same CNN of 11 thousand parameters with SGD, on the same random images, 120 per rank and
step. All programs except "batch-wise" read a TensorDataset; the bare script uses torch's own DataLoader. The
bare script is started by torchrun, and as "launched" by `tandem launch`. tandem runs with its default
settings. The model itself measures the time of a step, from one forward pass on rank 0 to the next, so the
clock is the same for all. A run counts as the median of its steps, and a framework as the median over rounds.
Every round runs all programs, and starts with a different one. Ratios compare runs of the same round.

Accelerate and Lightning are installed from PyPI into a separate environment, --environment, which can import
the packages of this one, including torch.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tandem
from table import Row, render, write
from tandem.data.datasets import Datasets, TensorImages
from tandem.tasks.classification import strided_cnn

RANKS, SHARE, SAMPLES = 2, 120, 12_000
WARM_UP = 50
ABORT = "terminate called without an active exception"  # of gloo's threads, when the interpreter ends
LIMIT_SECONDS = 600
LR, MOMENTUM = 0.05, 0.9
TIMES, STEPS = "FRAMEWORK_COST_TIMES", "FRAMEWORK_COST_STEPS"  # what a run is told by its environment
HERE = Path(__file__).resolve()
MEAN, STD = 0.187, 0.209


class Timed(nn.Module):
    """The CNN; rank 0 records the start of each training pass, and writes the times at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = strided_cnn()
        self.times: list[float] = []

    def forward(self, pictures: Tensor) -> Tensor:
        if self.training:
            self.times.append(time.perf_counter())
            if len(self.times) == int(os.environ[STEPS]) and torch.distributed.get_rank() == 0:
                Path(os.environ[TIMES]).write_text(json.dumps(self.times))
        logits: Tensor = self.cnn(pictures)
        return logits


def pictures() -> tuple[Tensor, Tensor]:
    """Return uint8 images [SAMPLES, 28, 28] and int64 labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (SAMPLES, 28, 28), dtype=torch.uint8, generator=generator)
    return images, torch.randint(10, (SAMPLES,), generator=generator)


def rows() -> TensorDataset:
    """Return the images as float32 [SAMPLES, 1, 28, 28], normalized in advance."""
    images, labels = pictures()
    return TensorDataset(images.unsqueeze(1).float().div_(255).sub_(MEAN).div_(STD), labels)


class Plain:
    """A tandem task with the TensorDataset."""

    def build_model(self) -> nn.Module:
        return Timed()

    def build_datasets(self) -> Datasets:
        return Datasets(rows(), TensorDataset(*rows()[:SHARE]))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])


class BatchWise(Plain):
    """A tandem task with images as in `digits`: uint8, normalized per batch."""

    def build_datasets(self) -> Datasets:
        images, labels = pictures()
        every = TensorImages(images, labels, [MEAN], [STD])
        return Datasets(every, TensorImages(images[:SHARE], labels[:SHARE], [MEAN], [STD]))


def bare() -> None:
    """Run the script that tutorials teach."""
    torch.distributed.init_process_group("gloo")
    data = rows()
    sampler: DistributedSampler[Any] = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, SHARE, sampler=sampler, drop_last=True)
    model = nn.parallel.DistributedDataParallel(Timed())
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    done = epoch = 0
    while done < int(os.environ[STEPS]):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            done += 1
        epoch += 1
    torch.distributed.destroy_process_group()


def own_loop() -> None:
    """Run the same script with `tandem.start()`."""
    run = tandem.start()
    model = run.wrap(Timed())
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    run.keep(model=model, optimizer=optimizer)
    for inputs, labels in run.batches(rows(), batch_size=RANKS * SHARE, steps=int(os.environ[STEPS])):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        run.backward(loss)
        optimizer.step()
        run.log(loss=loss)


def accelerate() -> None:
    from accelerate import Accelerator  # type: ignore[import-not-found]

    accelerator = Accelerator(cpu=True)
    model = Timed()
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    loader = DataLoader(rows(), SHARE, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    while done < int(os.environ[STEPS]):
        for inputs, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            done += 1
    accelerator.end_training()


def lightning() -> None:
    import pytorch_lightning  # type: ignore[import-not-found]

    class Module(pytorch_lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Timed()

        def training_step(self, batch: Any, _index: int) -> Tensor:
            return functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), LR, MOMENTUM)

    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_steps=int(os.environ[STEPS]),
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(rows(), SHARE, shuffle=True, drop_last=True))


SCRIPTS: dict[str, Callable[[], None]] = {
    "bare": bare,
    "own-loop": own_loop,
    "accelerate": accelerate,
    "lightning": lightning,
}


def torchrun(python: str, name: str) -> list[str]:
    module = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    return [*module, str(HERE), "--as", name]


def launched(*words: str) -> list[str]:
    """Run with all of tandem's defaults: telemetry, checkpoints, snapshots, evaluation."""
    settings = ["--device", "cpu", "--metrics", "0", "--metrics-linger", "0", "--run-dir", "run"]
    return [sys.executable, "-m", "tandem", "launch", "--nproc", str(RANKS), *settings, *words]


def task(name: str) -> list[str]:
    length = ["--batch-size", str(RANKS * SHARE), "--steps", os.environ[STEPS], "--lr", str(LR)]
    return launched("--task", f"{HERE}:{name}", *length)


class Contender(NamedTuple):
    """A program to measure: its name, its command, and its limit as a multiple of the bare script."""

    name: str
    command: Callable[[str], list[str]]  # of the Python that has Accelerate and Lightning
    limit: float | None = None


CONTENDERS = {
    "accelerate": Contender("Accelerate", lambda python: torchrun(python, "accelerate")),
    "lightning": Contender("Lightning", lambda python: torchrun(python, "lightning")),
    "task": Contender("tandem, TensorDataset", lambda _: task("Plain"), 1.05),
    "batch-wise": Contender("tandem, batch-wise dataset", lambda _: task("BatchWise")),
    "own-loop": Contender("a custom loop", lambda _: launched(str(HERE), "--as", "own-loop"), 1.02),
    "launched": Contender(
        "the bare script under tandem launch", lambda _: launched(str(HERE), "--as", "bare")
    ),
}


def make_environment(folder: Path) -> str:
    """Return the Python of an environment with Accelerate and Lightning, on top of this one."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        own = subprocess.check_output(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], text=True
        )
        (Path(own.strip()) / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        install = [str(python), "-m", "pip", "install", "--quiet", "accelerate", "pytorch-lightning"]
        subprocess.run(install, check=True)
    return str(python)


def median_step(command: list[str]) -> float:
    """Return the milliseconds of the median step of one run, without its first WARM_UP."""
    with tempfile.TemporaryDirectory(prefix="framework-cost-") as folder:
        times = Path(folder) / "times.json"
        source = os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE.parent)])
        foreign = ("TANDEM_", "OMP_", "PYTHONPATH")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        environment |= {TIMES: str(times), "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=folder, env=environment, timeout=LIMIT_SECONDS, capture_output=True, text=True
        )
        aborted = ABORT in done.stderr  # now and then at a peer's exit; its steps had all been timed
        if not times.exists() or (done.returncode != 0 and not aborted):
            raise SystemExit(f"{' '.join(command)} ended {done.returncode}:\n{done.stdout}{done.stderr}")
        noted = json.loads(times.read_text())[WARM_UP:]
    return statistics.median(b - a for a, b in zip(noted, noted[1:], strict=False)) * 1000


def measure(rounds: int, steps: int, environment: Path, only: Sequence[str]) -> list[Row]:
    os.environ[STEPS] = str(steps)
    has_peers = not {"accelerate", "lightning"}.isdisjoint(only)
    python = make_environment(environment) if has_peers else sys.executable
    commands = {"bare": torchrun(sys.executable, "bare")}
    commands |= {name: CONTENDERS[name].command(python) for name in only}
    found: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds):
        names = list(commands)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(median_step(commands[name]))
            print(f"round {number + 1}: {name} {found[name][-1]:.2f} ms", file=sys.stderr, flush=True)
    return [_row(CONTENDERS[name], found[name], found["bare"]) for name in only]


def _row(contender: Contender, mine: list[float], control: list[float]) -> Row:
    ratio, limit = statistics.median(a / b for a, b in zip(mine, control, strict=True)), contender.limit
    return Row(
        f"a step of {contender.name}",
        len(mine),
        _spread(mine),
        f"bare DDP script {_spread(control)}",
        f"{ratio:.3f}",
        f"at most {limit}" if limit else "",
        limit is None or ratio <= limit,
        len(control),
        statistics.median(mine) / 1000,
        statistics.median(control) / 1000,
    )


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ms ({min(values):.2f} to {max(values):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    cache = Path(tempfile.gettempdir()) / "tandem-framework-cost"
    parser.add_argument("--environment", type=Path, default=cache, help=f"[{cache}]")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="beside bare")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    parser.add_argument("--as", dest="script", choices=SCRIPTS, help="be a rank of this script")
    asked = parser.parse_args()
    if asked.script:
        SCRIPTS[asked.script]()
        return 0
    table = measure(asked.rounds, asked.steps, asked.environment, asked.only)
    print(render(table))
    if asked.json:
        write(table, asked.json)
    return int(not all(row.passed for row in table))


if __name__ == "__main__":
    sys.exit(main())
