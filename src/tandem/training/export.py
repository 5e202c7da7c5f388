"""Implement `tandem export` for weights: one file that can be read without tandem."""

import inspect
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as trees

from tandem.checkpoint.state import weights_sha256
from tandem.config import Settings
from tandem.data.datasets import Datasets
from tandem.data.kinds import evaluation_batches
from tandem.data.loader import batch_size_of
from tandem.data.seeds import seed_model
from tandem.distributed.whole_state import write_dcp
from tandem.errors import CheckpointError, ConfigError, UnloadableError
from tandem.tasks.base import TaskWithDefaults, load_task
from tandem.tasks.build import datasets_of, model_of
from tandem.tasks.mistakes import kind, mistake
from tandem.text import one_line
from tandem.training.train_state import check_model, recall
from tandem.training.weights import SavedCheckpoint, load_saved, tensors_in

SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt", "dcp": ".dcp"}


def export(source: str, kind: str, output: Path | None) -> str:
    """Write the weights at `source` in the format `kind`; return a line about it.

    `source` is RUN, CHECKPOINT, or either with @STEP. Raises ConfigError if there is no such checkpoint, if
    the file already exists, or if safetensors is missing.
    """
    try:
        saved = load_saved(source)
    except UnloadableError as error:
        raise ConfigError(str(error)) from error
    try:
        weights = tensors_in(saved.state)
    except CheckpointError as error:
        raise ConfigError(f"step {saved.step} in {saved.directory}: {error}") from error
    path = path_for(saved, SUFFIXES[kind], output)
    digest = weights_sha256(weights)
    write_whole(path, lambda there: WRITERS[kind](_apart(weights), there, facts_of(saved, digest)))
    elements = sum(tensor.numel() for tensor in weights.values())
    return (
        f"{path}: step {saved.step:,}, {len(weights)} tensors, {elements:,} numbers, "
        f"{_size(path):,} bytes; weights {digest[:12]}"
    )


def path_for(saved: SavedCheckpoint, suffix: str, output: Path | None) -> Path:
    """Return the output path. Raises ConfigError if it already exists."""
    path = output or Path(f"{saved.run_name}-step-{saved.step}{suffix}")
    # A broken link counts, too, because os.replace would overwrite it.
    if os.path.lexists(path):
        raise ConfigError(f"{path} already exists; remove it, or choose another file with --output FILE")
    return path


def facts_of(saved: SavedCheckpoint, digest: str) -> dict[str, str]:
    """Return the metadata for file formats that can store it next to the tensors."""
    task = str(saved.info.get("task", ""))
    # transformers refuses a safetensors file without this format.
    return {"format": "pt", "task": task, "step": str(saved.step), "weights_sha256": digest}


def _apart(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors without shared memory, which safetensors cannot represent."""
    return {name: tensor.detach().contiguous().clone() for name, tensor in weights.items()}


def _size(path: Path) -> int:
    """Return the bytes of a file, or of the files in a directory."""
    return sum(each.stat().st_size for each in ([path] if path.is_file() else path.iterdir()))


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


WRITERS: Mapping[str, Callable[[dict[str, Tensor], Path, dict[str, str]], None]] = {
    "safetensors": _safetensors,
    "torch": lambda weights, path, _facts: torch.save(weights, path),
    "dcp": lambda weights, path, _facts: write_dcp(weights, path),
}


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
                )  # the main file last: ONNX above 2 GB has a second file
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}; choose another file with --output FILE"
        ) from error


# Implement `tandem export --format onnx|hf`: a task's model with the weights of a checkpoint.

SAMPLES = 3
"""Samples in the traced batch. torch.export would treat a size of 1 as a constant."""
TOLERANCE = 1e-5
"""Tolerance relative to the largest output, or to 1 if that is smaller."""
NEEDED = "--format onnx needs onnx and onnxscript: pip install 'tandem-train[export]'"


class ExampleCall(NamedTuple):
    """How the task calls its model with a batch of `size` samples."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    size: int

    def of(self, size: int) -> "ExampleCall":
        """Return the same call with the first `size` samples."""
        args, kwargs = trees.tree_map(lambda leaf: leaf[:size] if self._has_samples(leaf) else leaf, self[:2])
        return ExampleCall(args, kwargs, size)

    def shapes(self, model: nn.Module) -> dict[str, Any]:
        """Return dynamic shapes for torch.export: dimension 0 is variable where it has one row per sample."""
        batch = torch.export.Dim("batch")
        named = inspect.signature(model.forward).bind(*self.args, **self.kwargs).arguments
        shapes: dict[str, Any] = trees.tree_map(
            lambda leaf: {0: batch} if self._has_samples(leaf) else None, dict(named)
        )
        return shapes

    def _has_samples(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == self.size


def export_model(
    source: str, form: str, output: Path | None, settings_of: Callable[[SavedCheckpoint], Settings]
) -> str:
    """Write the model with the weights at `source` in the format `form`; return a line about it.

    `settings_of` returns the settings of a checkpoint, which name the task. Raises ConfigError if there is no
    such checkpoint, for weights of another model, for a model that cannot be exported, and if the ONNX
    model's output differs.
    """
    saved = load_saved(source)
    settings = settings_of(saved)
    path = path_for(saved, "" if form == "hf" else f".{form}", output)
    state = saved.state
    weights = tensors_in(state)
    data = settings.data
    task = TaskWithDefaults(
        load_task(settings.run.task, settings.run.task_fields, data.data_dir, data.download)
    )
    task.prepare()
    datasets = datasets_of(task, settings.run.seed)
    seed_model(settings.run.seed)
    # place() expects as many devices as in training. Here each of them is the CPU.
    model = model_of(task, [torch.device("cpu")] * settings.compute.devices_per_rank)
    check_model(model, weights)
    model.load_state_dict(weights)
    recall(task, state)
    task.moment.resume(saved.step, saved.epoch_steps)
    task.after_resume(model)
    model.eval()
    digest = weights_sha256(weights)
    about = f"step {saved.step:,}"
    if form == "hf":
        write_whole(path, _saver(task, model))
        return f"{path}: {about}, for {type(model).__name__}.from_pretrained; weights {digest[:12]}"
    call = call_of(task, datasets, model)
    described = ""

    def write(there: Path) -> None:
        nonlocal described
        described = write_onnx(model, call, there, facts_of(saved, digest))

    write_whole(path, write)
    return f"{path}: {about}, {described}, {path.stat().st_size:,} bytes; weights {digest[:12]}"


def _saver(task: TaskWithDefaults, model: nn.Module) -> Callable[[Path], None]:
    save: Any = getattr(model, "save_pretrained", None)
    if not callable(save):
        advice = "--format hf needs a transformers-style model; use --format onnx or safetensors"
        raise mistake(task.build_model, f"{kind(model)}, which has no save_pretrained()", advice)
    return lambda there: save(str(there))


def call_of(task: TaskWithDefaults, datasets: Datasets, model: nn.Module) -> ExampleCall:
    """Return how the task calls its model with a few evaluation samples.

    Uses training samples if there is no evaluation set.
    """
    dataset = datasets.train if datasets.evaluation is None else datasets.evaluation
    dataset = next(iter(dataset.values())) if isinstance(dataset, Mapping) else dataset
    batches = evaluation_batches(dataset, 0, 1, SAMPLES, collate=task.collate, device=torch.device("cpu"))
    batch = next(batches, None)
    if batch is None:
        raise ConfigError("the task's datasets have no samples to trace the model with")
    calls: list[ExampleCall] = []

    def remember(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(ExampleCall(args, kwargs, batch_size_of(batch)))

    # Only the task knows how a batch becomes the model's arguments, so its own call is recorded.
    with model.register_forward_pre_hook(remember, with_kwargs=True), torch.no_grad():
        task.evaluate_batch(model, batch)
    if not calls:
        method = task.evaluate_batch if "evaluate_batch" in task.own else task.loss
        raise mistake(
            method, "the model itself", "call model(...), whose graph is exported to ONNX", "never calls"
        )
    return calls[0]


def write_onnx(model: nn.Module, call: ExampleCall, path: Path, facts: Mapping[str, str]) -> str:
    """Write the model's graph, compare it with the model, and return its inputs and outputs as text."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(NEEDED) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings about itself
        try:
            program = torch.onnx.export(
                model,
                call.args,
                kwargs=call.kwargs,
                dynamic_shapes=call.shapes(model),
                dynamo=True,
                verbose=False,
            )
        except Exception as error:  # a graph's tracer may raise anything
            reason = one_line(error.__cause__ or error)[:300]
            raise ConfigError(f"torch.onnx cannot export the model ({reason})") from error
    assert program is not None
    program.model.metadata_props.update(facts)
    program.save(str(path))
    inputs = program.model.graph.inputs
    outputs = program.model.graph.outputs
    any_size = any("batch" in map(str, each.shape or ()) for each in inputs)
    signature = f"{', '.join(map(_input_text, inputs))} -> {', '.join(map(_input_text, outputs))}"
    # A second size shows whether the exported graph fixed the batch size by mistake.
    sizes = (call.size, call.size - 1) if any_size else (call.size,)
    return f"{signature}, {_compared(model, path, [call.of(size) for size in sizes])}"


def _input_text(value: Any) -> str:
    return f"{value.name} [{', '.join(map(str, value.shape or ()))}]"


def _compared(model: nn.Module, path: Path, calls: list[ExampleCall]) -> str:
    """Return the largest difference of the outputs, as text. Raises ConfigError if it is too large."""
    try:
        import onnxruntime
    except ImportError:
        return "not compared with PyTorch, because onnxruntime is not installed"
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    distances = [torch.zeros((), dtype=torch.float64)]
    for call in calls:
        given = [leaf for leaf in trees.tree_leaves(call[:2]) if isinstance(leaf, Tensor)]
        found = session.run(None, {name: leaf.numpy() for name, leaf in zip(names, given, strict=True)})
        with torch.no_grad():
            leaves = trees.tree_leaves(model(*call.args, **call.kwargs))
        wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for theirs, ours in zip(found, wanted, strict=True):
            apart = (torch.from_numpy(theirs).double() - ours.double()).abs().max()
            distances.append(apart / ours.double().abs().max().clamp(min=1.0))
    largest = float(torch.stack(distances).max())  # torch's max keeps a NaN, which Python's ignores
    if not largest <= TOLERANCE:
        raise ConfigError(
            f"the ONNX model's output differs from PyTorch's by {largest:.1e}, more than {TOLERANCE:g}"
        )
    return f"within {largest:.0e} of PyTorch's output"
