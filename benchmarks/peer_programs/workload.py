"""What every contender of peers.py trains, and the record of its steps. Needs only torch.

The model, the loss and the delay are those of `small_task.Small`. A rank reads SHARE samples per step, in the
order of torch's DistributedSampler, and appends one line per finished step to a file of its process.
"""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, TensorDataset

RANKS = 2
SHARE = 32
SAMPLES = 400_000
"""No run reaches the end of the first epoch, so a sample that is used twice is one too many."""
SAVE_EVERY = 50
DELAY = 0.005
LR = 0.01
FOLDER = "PEERS_FOLDER"


def folder() -> Path:
    """The directory of the run: the records, the checkpoint."""
    return Path(os.environ[FOLDER])


def build_model() -> nn.Module:
    """Return the 5,059 parameters of small_task.py, with the same first values on each rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2)),
        *(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)),
    )


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), LR, momentum=0.9)


def rows() -> TensorDataset:
    """Return inputs [SAMPLES, 8], labels [SAMPLES], and the number of each sample [SAMPLES]."""
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(7))
    return TensorDataset(inputs, inputs[:, :3].argmax(1), torch.arange(SAMPLES))


def order(rank: int) -> list[int]:
    """Return this rank's samples of the first epoch, as torch's sampler draws them."""
    return list(DistributedSampler(range(SAMPLES), RANKS, rank, shuffle=True, seed=0))  # type: ignore[arg-type]


def loss_of(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    time.sleep(DELAY)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Record:
    """The finished steps of this process: time, rank, ranks, step, 1 if it counted, samples; a line each."""

    def __init__(self) -> None:
        path = folder() / f"steps-{os.getpid()}.txt"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def step(self, number: int, rank: int, ranks: int, samples: Sequence[int], counted: bool = True) -> None:
        """Write one line, at once: what a killed process has finished is in the file."""
        words = (f"{time.time():.6f}", rank, ranks, number, int(counted), ",".join(map(str, samples)))
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset, samples: Sequence[int]
) -> None:
    """One step of a plain loop."""
    optimizer.zero_grad()
    loss_of(model, data[list(samples)]).backward()
    optimizer.step()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> Iterator[int]:
    """A plain loop without an end, after `done` steps. Yields the number of each step when it is finished."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data, samples, record = rows(), order(rank), Record()
    while True:
        used = samples[done * SHARE : (done + 1) * SHARE]
        train_step(model, optimizer, data, used)
        done += 1
        record.step(done, rank, ranks, used)
        yield done


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Return what a checkpoint has."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def load(state: dict[str, Any] | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a state, if there is one, and return the number of finished steps."""
    if not state:
        return 0
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def save(state: dict[str, Any]) -> None:
    """Replace the checkpoint atomically."""
    torch.save(state, folder() / "new.pt")
    (folder() / "new.pt").replace(folder() / "checkpoint.pt")


def saved() -> dict[str, Any] | None:
    """Return the newest checkpoint, or None if there is none."""
    path = folder() / "checkpoint.pt"
    return torch.load(path, weights_only=True) if path.exists() else None
