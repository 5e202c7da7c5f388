"""Implement `--init-from`: find the weights that a fresh run starts from, read them, fit them to a model.

Accepts a checkpoint of tandem (a run, its checkpoints, one step, or PATH@STEP), a .pt or .pth file of
torch.save, a .safetensors file, or a name of torchvision's weights. Only tensors are read: a file that would
run code is rejected before any of it runs.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem import layout
from tandem.checkpoint.decision import locate, warn_damaged
from tandem.checkpoint.sharded import read_state
from tandem.checkpoint.state import deserialize, serialize
from tandem.data.datasets import torchvision_for
from tandem.distributed.strategy import Strategy
from tandem.errors import CheckpointError, ConfigError, UnloadableError
from tandem.paths import exists, is_file
from tandem.text import did_you_mean, nearest, one_line

log = logging.getLogger("tandem.run")

CONTAINERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training programs store the model: Lightning, timm, torch's tutorials, torchvision."""
PREFIXES = ("module.", "_orig_mod.", "model.")
"""Prefixes that DDP, torch.compile and a wrapping module add to a model's names."""
NAMED_WEIGHTS = re.compile(r"(torchvision:)?(\w+_Weights(\.\w+)?)")
VALID = (
    "a .pt, .pth or .safetensors file, a run or checkpoint of tandem, or torchvision's name of weights, "
    "such as ResNet18_Weights.DEFAULT"
)
SHOWN = 4


def _found(source: PurePath, download: bool) -> PurePath:
    """Return the path that `source` refers to; downloads it first if it names torchvision's weights."""
    named = NAMED_WEIGHTS.fullmatch(str(source))
    # A file of that name wins over torchvision's weights.
    if named is not None and not (isinstance(source, Path) and exists(source)):
        return _torchvision_file(named[2], download)
    # No file has the name PATH@STEP, which `locate` reads.
    if isinstance(source, Path) and not exists(source) and "@" not in source.name:
        raise ConfigError(
            f"--init-from: {source} does not exist (looked from {Path.cwd()}); expected {VALID}"
        )
    return source


def read_weights(source: PurePath, download: bool) -> bytes:
    """Return the tensors by name that `source` refers to, serialized. Raises ConfigError."""
    source = _found(source, download)
    try:
        if isinstance(source, Path) and is_file(source):
            return serialize(tensors_in(_state_in(source)))
        return serialize(tensors_in(load_saved(str(source)).state))
    except CheckpointError as error:
        raise ConfigError(
            f"--init-from {source}: {error}; save only the weights: torch.save(model.state_dict(), FILE)"
        ) from error
    except (ConfigError, OSError) as error:
        raise ConfigError(f"--init-from {source}: {error}") from error


def _state_in(path: Path) -> Mapping[str, Any]:
    """Return the content of a file. Raises CheckpointError if it is not a state, or would run code."""
    if path.suffix != ".safetensors":
        try:
            return deserialize(path.read_bytes())
        except (CheckpointError, OSError):
            raise
        except Exception as error:  # the file may have any content, and torch's readers assume a format
            raise CheckpointError(f"torch cannot read it ({one_line(error)})") from error
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConfigError("reading it needs safetensors: pip install 'tandem-train[export]'") from error
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"not a valid safetensors file ({one_line(error)})") from error


class SavedCheckpoint(NamedTuple):
    """A valid checkpoint in `directory`: its whole state, and the content of its manifest."""

    directory: PurePath
    step: int
    state: dict[str, Any]
    info: Mapping[str, Any]

    @property
    def epoch_steps(self) -> int:
        return max(1, self.info.get("steps_per_epoch") or 1)

    @property
    def run_name(self) -> str:
        """The name of the run's directory, or of the parent directory if the checkpoint is not in a run."""
        return (self.directory.parent if self.directory.name == layout.CHECKPOINTS else self.directory).name


def load_saved(source: str) -> SavedCheckpoint:
    """Return the newest valid checkpoint at `source`, or the step that it names. Raises ConfigError."""
    store, step = locate(source)

    def read(step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        try:
            return read_state(store, step)
        except UnloadableError as error:
            raise UnloadableError(f"step {step} in {store.directory}: {error}") from error

    if step is not None:
        return SavedCheckpoint(store.directory, step, *read(step))
    # Reading weights must not change a run, which may still train.
    found = store.newest(read, warn_damaged, quarantine=False)
    if found is None:
        raise ConfigError(f"{store.directory} contains no valid checkpoint")
    return SavedCheckpoint(store.directory, found[0], *found[1])


def _torchvision_file(name: str, download: bool) -> Path:
    """Return torchvision's file for the weights of that name, downloaded if necessary and allowed.

    Raises ConfigError.
    """
    models = torchvision_for("--init-from " + name).models
    member = name if "." in name else f"{name}.DEFAULT"
    try:
        url = models.get_weight(member).url
    except (ValueError, KeyError, AttributeError) as error:
        kinds = [each for each in dir(models) if each.endswith("_Weights")]
        kind = member.partition(".")[0]
        members = [str(each) for each in getattr(models, kind)] if kind in kinds else []
        hint = did_you_mean(nearest(member, members, least=0) or nearest(kind, kinds))
        raise ConfigError(f"--init-from {name}: torchvision has no such weights{hint}") from error
    # torchvision uses the same directory, so its downloads are found, too.
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    path: Path = folder / url.rpartition("/")[2]
    if is_file(path):
        return path
    if not download:
        raise ConfigError(
            f"--init-from {name}: {path} does not exist; copy the file there, or use --download"
        )
    log.info("downloading %s", name)
    checked = re.search(r"-([0-9a-f]{8,})\.", path.name)  # the name contains the beginning of its hash
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), checked[1] if checked else None, progress=False)
    except (OSError, RuntimeError) as error:  # URLError is an OSError
        raise ConfigError(
            f"--init-from {name} could not be downloaded ({one_line(error)}); check the network, or put the "
            f"file at {path}"
        ) from error
    return path


def tensors_in(state: object) -> dict[str, Tensor]:
    """Return the tensors of a saved state by name; it may be nested, such as {"state_dict": ...}.

    Raises CheckpointError if there are none.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"it contains a {type(state).__name__}, expected a state_dict")
    inner = next((state[key] for key in CONTAINERS if isinstance(state.get(key), Mapping)), None)
    if inner is not None:
        return tensors_in(inner)
    found = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    if not found:
        keys = ", ".join(list(map(str, state))[:SHOWN])
        raise CheckpointError(f"it contains no named tensors (found: {keys or 'nothing'})")
    return found


@dataclass(frozen=True)
class WeightMatch:
    """The tensors of a file that match a model's, by the model's names, and those that do not match."""

    loaded: Mapping[str, Tensor]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    wrong_shaped: tuple[str, ...]
    elements: tuple[int, int]
    """How many elements of the model's parameters are loaded, and how many there are."""

    @property
    def share(self) -> float:
        """The loaded share of the model's parameters by elements; of its tensors if it has none."""
        loaded, whole = self.elements
        return loaded / whole if whole else len(self.loaded) / max(1, len(self.loaded) + len(self.missing))

    def table(self) -> Iterator[str]:
        """Yield one line per kind, with the exact count and the first names."""
        rows = ("loaded", self.loaded), ("missing", self.missing), ("unexpected", self.unexpected)
        for kind, names in (*rows, ("wrong shape", self.wrong_shaped)):
            shown = ", ".join(list(names)[:SHOWN])
            more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
            yield f"  {kind:<11} {len(names):>6,}  {shown}{more}".rstrip()


def match_weights(theirs: Mapping[str, Tensor], model: nn.Module) -> WeightMatch:
    """Match a file's tensors with a model's: by shape and name, exactly or without PREFIXES on both sides."""
    model_state = model.state_dict()
    by_core: dict[str, list[str]] = {}
    for name in model_state:
        by_core.setdefault(_core(name), []).append(name)
    matches: dict[str, str] = {name: name for name in theirs if name in model_state}
    for name in theirs:
        candidates = by_core.get(_core(name), [])
        # Names that differ only in their prefixes are ambiguous, so none of them is guessed.
        if name not in matches and len(candidates) == 1 and candidates[0] not in matches.values():
            matches[name] = candidates[0]
    loaded = {}
    wrong = {}
    for name, match in matches.items():
        here = tuple(getattr(model_state[match], "shape", ()))
        there = tuple(theirs[name].shape)
        if here == there and isinstance(model_state[match], Tensor):
            loaded[match] = theirs[name]
        else:
            wrong[match] = f"{match} is {there} in the file but {here} in the model"
    # A tied parameter has several names, and counts once if any of them is loaded.
    names: dict[int, tuple[int, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), (parameter.numel(), []))[1].append(name)
    elements = sum(count for count, own in names.values() if any(name in loaded for name in own))
    return WeightMatch(
        loaded=loaded,
        missing=tuple(name for name in model_state if name not in loaded and name not in wrong),
        unexpected=tuple(name for name in theirs if name not in matches),
        wrong_shaped=tuple(wrong.values()),
        elements=(elements, sum(count for count, _ in names.values())),
    )


@dataclass(frozen=True)
class InitialWeights:
    """The weights that a fresh run starts from; if `strict`, `source` must have all parameters."""

    tensors: Mapping[str, Tensor]
    source: PurePath
    strict: bool

    def load(self, strategy: Strategy, model: nn.Module) -> None:
        """Load the tensors that fit, and log the others. Raises ConfigError if too few fit."""
        found = match_weights(self.tensors, model)
        (loaded, whole), share = found.elements, found.share
        summary = f"{_percent(share)} of the model's parameters ({loaded:,} of {whole:,})"
        for line in (f"starting from {self.source}: {summary}", *found.table()):
            log.info("%s", line)
        if share == 0 or (self.strict and share < 1):
            wants = "but --init-strict requires all" if share else "so nothing can be loaded from it"
            lacks = [*found.wrong_shaped, *(f"{name} is missing" for name in found.missing)][:2]
            raise ConfigError(
                f"--init-from {self.source} has {summary}, {wants} ({'; '.join(lacks)}; the table in the log "
                f"has all); use weights of this model{', or omit --init-strict' if share else ''}"
            )
        # Parameters that the file lacks keep their initial values.
        strategy.load_model(model, found.loaded, strict=False)


def _percent(share: float) -> str:
    """Format to a tenth of a percent; only a share of 1 is 100.0%."""
    return f"{share:.1%}" if share == 1 else f"{min(round(share * 100, 1), 99.9)}%"


def _core(name: str) -> str:
    while (prefix := next((each for each in PREFIXES if name.startswith(each)), None)) is not None:
        name = name.removeprefix(prefix)
    return name
