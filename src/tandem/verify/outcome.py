"""Compare the results of two runs bit by bit, and report the first step and the first tensor that differ."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem import layout
from tandem.checkpoint.sharded import read_state
from tandem.run.directory import RunDir

NUMBERS = (
    "step",
    "loss",
    "learning_rate",
    "grad_norm",
    "scores",
    "eval",
)  # values of a log line to compare; times differ between any two runs
NOT_STATE = ("model", "log")
"""Parts of a checkpoint that are compared separately: weights, and log lines."""


@dataclass(frozen=True)
class Outcome:
    """The values to compare: the last checkpoint, by section, and each line of the loss log."""

    step: int
    weights: dict[str, Any]
    weights_sha256: str
    state: dict[str, Any]
    losses: list[dict[str, Any]]
    world_size: int

    def digests(self) -> dict[str, str]:
        parts = {"weights": self.weights, "state": self.state, "losses": flat(self.losses)}
        return {name: digest(part) for name, part in parts.items()}

    @classmethod
    def read(cls, run_dir: Path) -> "Outcome":
        """Read the outcome of a finished run. Raises CheckpointError for a state that cannot be read."""
        summary = json.loads((run_dir / layout.SUMMARY).read_text())
        step = int(summary["global_step"])
        state = read_state(RunDir(run_dir).checkpoints, step)[0]
        rest = {name: part for name, part in state.items() if name not in NOT_STATE}
        lines = [json.loads(line) for line in (run_dir / layout.METRICS).read_text().splitlines()]
        losses = [{name: line[name] for name in NUMBERS if name in line} for line in lines]
        return cls(
            step,
            flat(state["model"]),
            summary["weights_sha256"],
            flat(rest),
            losses,
            int(summary["world_size"]),
        )


def difference(one: Outcome, other: Outcome) -> str | None:
    """Describe how two runs differ: the first step with another loss, the first other tensor; or None."""
    found = []
    # A log that ends earlier differs at its first missing line.
    nothing: dict[str, Any] = {}
    for here, there in zip_longest(one.losses, other.losses, fillvalue=nothing):
        if here != there:
            step, (ours, theirs) = here.get("step", there.get("step")), (flat(here), flat(there))
            name = next(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
            shown = name.removeprefix("scores.").removeprefix("eval.")
            values = (str(each.get(name, "missing")) for each in (theirs, ours))
            found.append(f"`{shown}` differs at step {step}: {' instead of '.join(values)}")
            break
    for part, ours, theirs in (
        ("weights", one.weights, other.weights),
        ("tensors and numbers of the state", one.state, other.state),
    ):
        names = [*ours, *(name for name in theirs if name not in ours)]
        differing = [n for n in names if n not in ours or n not in theirs or not _same(ours[n], theirs[n])]
        if differing:
            differ = "differs" if len(differing) == 1 else "differ"
            found.append(
                f"{len(differing)} of {len(names)} {part} {differ} at the end, first `{differing[0]}`"
            )
    if not found and one.weights_sha256 != other.weights_sha256:
        found.append("the checkpoints agree, but weights_sha256 in summary.json differs")
    return "; ".join(found) or None


def _same(one: Any, other: Any) -> bool:
    return _bytes(one) == _bytes(other)


def digest(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of named values, ordered by name: tensors by dtype, shape and bytes."""
    total = hashlib.sha256()
    for name, value in sorted(values.items()):
        # The zero byte ends the name. Without it, another split of the same characters would have the same
        # digest.
        total.update(f"{name}\0".encode())
        total.update(_bytes(value))
    return total.hexdigest()


def _bytes(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        # repr() has all digits of a float.
        return repr(value).encode()
    # Hash bytes, not values: NaN differs from itself, and -0.0 equals 0.0. A scalar needs a dimension for
    # view().
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    # Zeros of two dtypes or shapes may have the same bytes.
    return f"{value.dtype}{tuple(value.shape)}".encode() + raw


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Flatten nested dicts and lists: {"a.0.b": leaf}."""
    if not isinstance(value, dict | list | tuple):
        return {name: value}
    found = {}
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        found.update(flat(inner, f"{name}.{key}" if name else str(key)))
    return found
