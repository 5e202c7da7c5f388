"""Models, optimizers and outputs as people have them: a row each, which plain DDP trains on two ranks.

And the task that trains a row; its first life on rank 1 ends at KILLED_AT where the environment says so.
"""

import collections
import dataclasses
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

from tandem.data.datasets import Datasets

BATCH, STEPS, SAMPLES, FEATURES = 12, 8, 96, 8
SAVED_AT, KILLED_AT = 4, 5
Loss = Callable[[nn.Module, Any], Tensor]
Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


@dataclasses.dataclass
class Row:
    """`model` and `optimizers` make what is trained, `loss` is the mean over a batch of `data`."""

    model: Callable[[], nn.Module]
    loss: Loss
    optimizers: Optimizers
    data: Callable[[], Any]
    closure: bool = False
    """Whether the optimizers' steps take one."""
    scaler: float = 0.0
    """A GradScaler's first scale."""
    average: bool = False
    """Whether an average of the weights goes along."""
    finds_unused: bool = False
    lines: dict[str, str] = dataclasses.field(default_factory=dict)
    """By entry point that refuses the row with exit code 2 before the first step, a word of its line."""


# Data


def rows() -> TensorDataset:
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, 0] > 0).long())


def words() -> TensorDataset:
    x = torch.randint(0, 20, (SAMPLES, 5), generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1) % 2)


def pictures() -> TensorDataset:
    x = torch.randn(SAMPLES, 2, 6, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())


class Named(Dataset[Any]):
    """Samples as dicts, with text."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = rows()[index]
        return {"name": f"sample {index}", "x": x, "y": y, "where": {"index": index}}


# Outputs: what a model gives, and how its logits are had.

Both = collections.namedtuple("Both", "hidden logits")


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: Tensor


class ModelOutput(collections.OrderedDict[str, Any]):
    """As transformers' outputs: a dict whose values are attributes, too."""

    def __post_init__(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Pair(tuple[Any, Any]):
    """A subclass of tuple."""


class Holder:
    """A class of one's own."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Shaped(nn.Module):
    """A small network whose logits `shape(logits, input)` puts into its output."""

    def __init__(self, shape: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.shape = shape
        self.first, self.last = nn.Linear(FEATURES, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        return self.shape(self.last(self.first(x).tanh()), x)


def by(logits: Callable[[Any], Tensor] = lambda output: output) -> Loss:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(logits(model(batch[0])).float(), batch[1])

    return loss


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def output(shape: Callable[[Tensor, Tensor], Any], logits: Callable[[Any], Tensor]) -> Row:
    return Row(lambda: Shaped(shape), by(logits), sgd, rows)


# Models


class OwnLoss(nn.Module):
    """Gives its loss itself, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2)

    def forward(self, x: Tensor, labels: Tensor) -> ModelOutput:
        logits = self.layer(x)
        return ModelOutput(loss=functional.cross_entropy(logits, labels), logits=logits, past=None)


class Embedded(nn.Module):
    def __init__(self, bag: bool = False, tied: bool = False, sparse: bool = True) -> None:
        super().__init__()
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.embedding = kind(20, 4, sparse=sparse)
        self.last = nn.Linear(4, 20 if tied else 2)
        if tied:
            self.last.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        made = self.embedding(x)
        return self.last(made if made.dim() == 2 else made.mean(1))[:, :2]


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(FEATURES, 2, dtype=torch.complex64) / 3)
        self.last = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x.to(torch.complex64) @ self.turn).abs())


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, 2)).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.bfloat16())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x.view(-1, 4, 2))[0][:, -1])


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(FEATURES, 6), nn.Linear(6, 2), reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return checkpoint(lambda h: self.last(h.tanh()), hidden, use_reentrant=self.reentrant)


class Skipping(nn.Module):
    """Leaves a layer out by chance, so some parameters have no gradient in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(FEATURES, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).tanh()
        if self.training and torch.rand(()) < 0.5:
            hidden = hidden + self.middle(hidden)
        return Both(hidden.detach(), self.last(hidden))


class Buffered(nn.Module):
    """`change(self)` makes, grows or replaces a buffer in each forward pass."""

    def __init__(self, change: Callable[[Any, Tensor], None], **buffers: Tensor | None) -> None:
        super().__init__()
        self.change, self.layer = change, nn.Linear(FEATURES, 2)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        scale = sum(buffer.double().mean() for buffer in self.buffers() if buffer.numel())
        return self.layer(x * (1 + torch.as_tensor(scale) / 10).float())


def made(model: Any, x: Tensor) -> None:
    if model.mask is None:
        model.register_buffer("mask", torch.ones(x.shape[1]))


def made_unannounced(model: Any, x: Tensor) -> None:
    if not hasattr(model, "cache"):
        model.register_buffer("cache", torch.ones(x.shape[1]))


def grown(model: Any, x: Tensor) -> None:
    if model.training and len(model.seen) < 5:
        model.seen = torch.cat([model.seen, torch.ones(1)])


def retyped(model: Any, x: Tensor) -> None:
    if model.training:
        model.count = model.count.double() + 0.25 if model.count.dtype != torch.int64 else model.count.float()


def shrunk(model: Any, x: Tensor) -> None:
    if model.training and len(model.left) > 2:
        model.left = model.left[:-1].clone()


# Optimizers


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization: a step up, a second look at the batch, a step from where it was."""

    def __init__(self, parameters: Any, rho: float = 0.05) -> None:
        super().__init__(parameters, {"rho": rho, "lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "SAM needs a closure"
        closure = torch.enable_grad()(closure)
        each = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in each]).norm()
        ups = [p.grad * (0.05 / (norm + 1e-12)) for p in each]
        for p, up in zip(each, ups, strict=True):
            p.add_(up)
        closure()
        for p, up in zip(each, ups, strict=True):
            p.sub_(up).sub_(p.grad, alpha=0.1)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 2))


def by_optimizer(make: Callable[[nn.Module], Any], **more: Any) -> Row:
    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        found = make(model)
        return found if isinstance(found, list) else [found]

    return Row(plain, by(), optimizers, rows, **more)


def by_model(model: Callable[[], nn.Module], data: Any = rows, loss: Loss | None = None, **more: Any) -> Row:
    return Row(model, loss or by(), more.pop("optimizers", sgd), data, **more)


def frozen_trunk() -> nn.Module:
    model = plain()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


def of_sparse(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, last = model[0], model[2]  # type: ignore[index]
    return [torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.Adam(last.parameters(), lr=0.01)]


def groups(model: nn.Module) -> torch.optim.Optimizer:
    first, last = model[0], model[2]  # type: ignore[index]
    parts = [{"params": first.parameters(), "lr": 0.01}, {"params": last.parameters(), "weight_decay": 0.1}]
    return torch.optim.AdamW(parts, lr=0.05)


class Outputs(NamedTuple):
    hidden: Any
    logits: Tensor


optim = torch.optim
ZOO: dict[str, Row] = {
    # outputs
    "tensor": output(lambda y, x: y, lambda o: o),
    "tuple": output(lambda y, x: (x, y), lambda o: o[1]),
    "list of dicts": output(lambda y, x: [{"x": x}, {"y": y}], lambda o: o[1]["y"]),
    "namedtuple": output(lambda y, x: Both(x, y), lambda o: o.logits),
    "typed namedtuple": output(lambda y, x: Outputs([x], y), lambda o: o.logits),
    "dataclass": output(lambda y, x: Output(y, x), lambda o: o.logits),
    "frozen dataclass": output(lambda y, x: Frozen(y), lambda o: o.logits),
    "dict subclass": output(lambda y, x: ModelOutput(logits=y, hidden=None), lambda o: o.logits),
    "tuple subclass": output(lambda y, x: Pair((None, y)), lambda o: o[1]),
    "distribution": output(lambda y, x: torch.distributions.Categorical(logits=y), lambda o: o.logits),
    "own class": output(lambda y, x: Holder(y), lambda o: o.logits),
    "function": output(lambda y, x: lambda: y, lambda o: o()),
    "members of None": output(lambda y, x: {"a": None, "y": y, "past": (None,)}, lambda o: o["y"]),
    "own loss": by_model(OwnLoss, loss=lambda m, b: m(b[0], labels=b[1]).loss),
    "dicts and text": by_model(
        plain, Named, lambda m, b: functional.cross_entropy(m(b["x"]), b["y"]) * len(b["name"]) / len(b["y"])
    ),
    # models
    "sparse embedding": by_model(Embedded, words, optimizers=of_sparse),
    "sparse bag, SparseAdam": by_model(
        lambda: Embedded(bag=True), words,
        optimizers=lambda m: [optim.SparseAdam([m.embedding.weight]), optim.SGD(m.last.parameters(), lr=0.1)],
        lines={"task": "build_optimizer"},
    ),
    "complex": by_model(Complex),
    "bfloat16": by_model(Half),
    "tied weights": by_model(lambda: Embedded(tied=True, sparse=False), words),
    "frozen trunk": by_model(frozen_trunk),
    "dropout": by_model(lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.Dropout(0.5), nn.Linear(6, 2))),
    "batchnorm": by_model(lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))),
    "cumulative batchnorm": by_model(
        lambda: nn.Sequential(
            nn.Linear(FEATURES, 6), nn.BatchNorm1d(6, affine=False, momentum=None), nn.Linear(6, 2)
        )
    ),
    "convolutions": by_model(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.GroupNorm(3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)
        ),
        pictures,
    ),
    "LSTM": by_model(Recurrent),
    "spectral norm": by_model(
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(FEATURES, 6)), nn.Linear(6, 2))
    ),
    "weight norm": by_model(
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(FEATURES, 6)), nn.Linear(6, 2))
    ),
    "checkpointing": by_model(lambda: Recomputed(False)),
    "reentrant checkpointing": by_model(lambda: Recomputed(True)),
    "unused parameters": by_model(Skipping, loss=by(lambda o: o.logits), finds_unused=True),
    "buffer made": by_model(lambda: Buffered(made, mask=None)),
    "buffer made unannounced": by_model(lambda: Buffered(made_unannounced)),
    "buffer grown": by_model(lambda: Buffered(grown, seen=torch.zeros(0))),
    "buffer shrunk": by_model(lambda: Buffered(shrunk, left=torch.ones(6))),
    "buffer retyped": by_model(lambda: Buffered(retyped, count=torch.zeros(2, dtype=torch.int64))),
    "lazy linear": by_model(lambda: nn.Sequential(nn.LazyLinear(6), nn.Dropout(0.2), nn.LazyLinear(2))),
    "lazy convolution": by_model(
        lambda: nn.Sequential(
            nn.LazyConv2d(3, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)
        ),
        pictures,
    ),
    # optimizers
    "LBFGS": by_optimizer(lambda m: optim.LBFGS(m.parameters(), lr=0.05, max_iter=3), closure=True),
    "LBFGS, line search": by_optimizer(
        lambda m: optim.LBFGS(m.parameters(), max_iter=3, line_search_fn="strong_wolfe"), closure=True
    ),
    "SAM": by_optimizer(lambda m: SAM(m.parameters()), closure=True),
    "fused Adam": by_optimizer(lambda m: optim.Adam(m.parameters(), lr=0.01, fused=True)),
    "RMSprop": by_optimizer(lambda m: optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5)),
    "Rprop": by_optimizer(lambda m: optim.Rprop(m.parameters(), lr=0.01)),
    "Adafactor": by_optimizer(lambda m: optim.Adafactor(m.parameters(), lr=0.01)),
    "ASGD": by_optimizer(lambda m: optim.ASGD(m.parameters(), lr=0.01)),
    "parameter groups": by_optimizer(groups),
    "some parameters": by_optimizer(lambda m: optim.Adam(m[2].parameters(), lr=0.01)),
    "two optimizers": by_optimizer(two, lines={"task": "build_optimizer"}),
    "average of weights": Row(plain, by(), sgd, rows, average=True),
    "GradScaler": by_optimizer(sgd, scaler=1e38),
    "GradScaler, fused": by_optimizer(lambda m: optim.Adam(m.parameters(), lr=0.01, fused=True), scaler=1e38),
}  # fmt: skip


def die_once(step: int, rank: int, saved: Path) -> None:
    """End rank 1 at KILLED_AT as a kill does, once `saved` is there."""
    if os.environ.get("ZOO_KILL") and step == KILLED_AT and rank == 1:
        deadline = time.monotonic() + 60
        while not saved.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


@dataclasses.dataclass
class Zoo:
    """The task of a row."""

    row: str = "tensor"

    def __post_init__(self) -> None:
        self._row = ZOO[self.row]

    def build_model(self) -> nn.Module:
        return self._row.model()

    def build_datasets(self) -> Datasets:
        return Datasets(self._row.data(), None)

    def build_optimizer(self, model: nn.Module) -> Any:
        made = self._row.optimizers(model)
        return made[0] if len(made) == 1 else made

    def loss(self, model: nn.Module, batch: Any, step: int) -> Tensor:
        saved = Path(os.environ["TANDEM_RUN_DIR"], "checkpoints", f"step-{SAVED_AT:09}")
        die_once(step, int(os.environ["RANK"]), saved)
        return self._row.loss(model, batch)


@dataclasses.dataclass
class ZooAveraged(Zoo):
    """With an average of the weights."""

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        self._average = average_of(model)
        return model.to(device)

    def after_step(self, model: nn.Module, step: int) -> None:
        self._average.update_parameters(model)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._average.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._average.load_state_dict(state)


def average_of(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
