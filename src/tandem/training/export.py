"""Implement `tandem export` for weights: one file that can be read without tandem."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from tandem.checkpoint.state import deserialize, weights_sha256
from tandem.data.datasets import one_line
from tandem.errors import CheckpointError, ConfigError
from tandem.training.weights import Saved, saved_at, tensors_in

SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt"}


def export(source: str, kind: str, output: Path | None) -> str:
    """Write the weights at `source` in the format `kind`; return a line about it.

    `source` is RUN, CHECKPOINT, or either with @STEP. Raises ConfigError if there is no such checkpoint, if
    the file already exists, or if safetensors is missing.
    """
    write = _writers()[kind]
    saved = saved_at(source)
    try:
        weights = tensors_in(deserialize(saved.raw))
    except CheckpointError as error:
        raise ConfigError(f"step {saved.step} in {saved.directory}: {error}") from error
    path = path_for(saved, SUFFIXES[kind], output)
    digest = weights_sha256(weights)
    write_whole(path, lambda there: write(_apart(weights), there, facts_of(saved, digest)))
    elements = sum(tensor.numel() for tensor in weights.values())
    return (
        f"{path}: step {saved.step:,}, {len(weights)} tensors, {elements:,} numbers, "
        f"{path.stat().st_size:,} bytes; weights {digest[:12]}"
    )


def path_for(saved: Saved, suffix: str, output: Path | None) -> Path:
    """Return the output path. Raises ConfigError if it already exists."""
    path = output or Path(f"{saved.run_name}-step-{saved.step}{suffix}")
    # A broken link counts, too, because os.replace would overwrite it.
    if os.path.lexists(path):
        raise ConfigError(f"{path} already exists; remove it, or choose another file with --output FILE")
    return path


def facts_of(saved: Saved, digest: str) -> dict[str, str]:
    """Return the metadata for file formats that can store it next to the tensors."""
    task = str(saved.info.get("task", ""))
    # transformers refuses a safetensors file without this format.
    return {"format": "pt", "task": task, "step": str(saved.step), "weights_sha256": digest}


def _apart(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors contiguous and without shared memory, which safetensors cannot represent."""
    return {name: tensor.detach().contiguous().clone() for name, tensor in weights.items()}


Write = Callable[[dict[str, Tensor], Path, dict[str, str]], None]


def _writers() -> dict[str, Write]:
    return {"safetensors": _safetensors, "torch": lambda weights, path, _facts: torch.save(weights, path)}


def _safetensors(weights: dict[str, Tensor], path: Path, facts: dict[str, str]) -> None:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigError(
            "--format safetensors needs safetensors: pip install 'tandem-train[export]', or use "
            "--format torch"
        ) from error
    try:
        save_file(weights, path, metadata=facts)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ConfigError(f"safetensors cannot store it ({one_line(error)}); use --format torch") from error


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file so that it appears under its name only when complete.

    Raises ConfigError if the directory cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # os.replace works only within one file system.
        with tempfile.TemporaryDirectory(prefix=".tmp-export-", dir=path.parent) as folder:
            write(Path(folder) / path.name)
            for made in sorted(Path(folder).iterdir(), key=lambda made: made.name == path.name):
                os.replace(
                    made, path.parent / made.name
                )  # the main file last: ONNX above 2 GB has a second one
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}; choose another file with --output FILE"
        ) from error
