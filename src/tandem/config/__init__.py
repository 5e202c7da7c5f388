"""Every setting, typed and documented, and where its value came from.

    flags  >  environment TANDEM_*  >  .env  >  --config FILE (TOML)  >  defaults

All sources hand in text (`Given`), the strongest wins, and `Settings` validates the winners once. A name
nobody knows is an error with the nearest match, so that a typo cannot silently train with a default.
"""

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin

from dotenv import dotenv_values
from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from tandem.errors import ConfigError
from tandem.schedule import CADENCE_VALID, Cadence, LrScaling, LrSchedule

PREFIX, TASK_PREFIX = "TANDEM_", "TANDEM_TASK__"
# Read elsewhere, but ours: not typos of a setting.
OTHER_VARIABLES = [
    PREFIX + name
    for name in "CONFIG STATE_DIR REQUIRE TRIALS SCREENSHOTS".split()
    + "COMPOSE_PROJECT COMPOSE_NODES COMPOSE_INDEX".split()
]
# A Kubernetes Service called tandem-* puts such variables into every pod of its namespace.
_SERVICE_LINK = re.compile(
    r"\w+_(SERVICE_HOST=|SERVICE_PORT(_\w+)?=|PORT_\d+_(TCP|UDP|SCTP)\w*=|PORT=\w+://).*"
)
SEE = "See `tandem config --explain`"


class Valid(str):
    """What a value may be, in words, for error messages and the table of the docs."""


def _checked(valid: str, is_valid: Callable[[str], bool]) -> tuple[AfterValidator, Valid]:
    def check(text: str) -> str:
        if not is_valid(text):
            raise ValueError(valid)
        return text

    return AfterValidator(check), Valid(valid)


def _is_cadence(text: str, not_in: str = "") -> bool:
    try:
        return Cadence.parse(text).unit != not_in
    except ValueError:
        return False


def _is_address(text: str) -> bool:
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})", text, re.ASCII)
    return found is not None and 1 <= int(found[2]) <= 65535


def _is_pair(text: str, is_valid: Callable[[int, int], bool]) -> bool:
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text, re.ASCII)
    return found is not None and is_valid(int(found[1]), int(found[2]))


_CADENCE = _checked(CADENCE_VALID, _is_cadence)
_WARMUP = _checked("steps, epochs or percent such as 0, 200, 1epoch, 5%", lambda s: _is_cadence(s, "seconds"))
_ADDRESS = _checked("HOST:PORT", _is_address)
_RANGE = _checked("MIN:MAX nodes, such as 1:4", lambda s: _is_pair(s, lambda low, high: 1 <= low <= high))
_WINDOW = _checked("START:STEPS, such as 10:5", lambda s: _is_pair(s, lambda _start, steps: steps >= 1))
_BEST = _checked(
    "METRIC, METRIC:min or METRIC:max, such as accuracy",
    lambda s: re.fullmatch(r"[^\s:]+(:(min|max))?", s) is not None,
)
_NAME = _checked(
    "up to 63 letters, digits, '.', '_' or '-', beginning with a letter or digit",
    lambda s: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", s) is not None,
)

Count = Annotated[int, Field(ge=1), Valid("a whole number of at least 1")]
Natural = Annotated[int, Field(ge=0), Valid("a whole number of at least 0")]
Seed = Annotated[int, Field(ge=0, lt=2**32), Valid("a whole number from 0 to 4294967295")]
Port = Annotated[int, Field(ge=0, le=65535), Valid("a port from 0 (any free one) to 65535")]
Positive = Annotated[float, Field(gt=0), Valid("a number above 0")]
NonNegative = Annotated[float, Field(ge=0), Valid("a number of at least 0")]
BelowOne = Annotated[float, Field(ge=0, lt=1), Valid("a number from 0 to below 1")]
CadenceText = Annotated[str, *_CADENCE]
WarmupText = Annotated[str, *_WARMUP]
ResumeText = Annotated[str, Valid("auto, never, required or PATH[@STEP]")]
Auto = Literal["auto"]


class Settings(BaseSettings):
    """The resolved settings of a run. Immutable; reads nothing by itself, `load` hands the values in."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, allow_inf_nan=False)

    task: str = Field("digits", description="a built-in task, FILE.py:Class or package.module:Class")
    data_dir: Path = Field(Path("data"), description="where data sets are looked for and cached")
    run_dir: Path | None = Field(None, description="all that a run writes; none: runs/TASK-TIME on a laptop")
    run_name: Annotated[str, *_NAME] | None = Field(None, description="the run's name in metrics and reports")
    epochs: Count = Field(4, description="passes over the training set")
    steps: Count | None = Field(None, description="optimizer steps to train; overrides epochs")
    batch_size: Count = Field(240, description="global batch: samples per optimizer step over all ranks")
    micro_batch_size: Count | None = Field(None, description="samples per rank and pass; none: all at once")
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="optimizer")
    lr: NonNegative = Field(0.1, description="peak learning rate, before lr_scaling")
    momentum: BelowOne = Field(0.9, description="momentum of sgd")
    weight_decay: NonNegative = Field(1e-4, description="weight decay")
    schedule: LrSchedule = Field("cosine", description="learning rate after the warm-up")
    lr_scaling: LrScaling = Field("none", description="how lr grows with batch_size / lr_base_batch_size")
    lr_base_batch_size: Count = Field(240, description="the global batch that lr was found with")
    warmup: WarmupText = Field("0", description="length of the linear warm-up")
    clip_norm: Positive | None = Field(None, description="largest gradient norm; none: no clipping")
    seed: Seed = Field(0, description="decides initial weights, order, augmentation and dropout")
    strategy: Literal["ddp"] = Field("ddp", description="how the model is distributed")
    sync_batchnorm: bool = Field(False, description="batch norm over the global batch")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="bf16 and fp16 are by autocast")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one")
    compile: bool = Field(False, description="compile the model with torch.compile")
    workers: Natural = Field(0, description="loader processes per rank")
    threads: Auto | Count = Field("auto", description="CPU threads per rank; auto: its share of the cores")
    nodes: Count | None = Field(None, description="number of nodes; none: what the platform says")
    node_rank: Natural | None = Field(None, description="index of this node, by hand")
    master: Annotated[str, *_ADDRESS] | None = Field(None, description="address of node 0, by hand")
    nproc: Auto | Count = Field("auto", description="ranks per node; auto: one per GPU, else 1")
    elastic: Annotated[str, *_RANGE] | None = Field(None, description="train with MIN to MAX nodes")
    master_timeout: Positive = Field(300.0, description="seconds to wait for the master and all nodes")
    first_step_timeout: Positive = Field(
        1800.0, description="seconds that the start, the first step, an evaluation or a save may take"
    )
    hang_timeout: Auto | Positive = Field(
        "auto",
        description="seconds until a step is a hang; auto: five of the longest recent steps, at least 10",
    )
    shutdown_timeout: Positive = Field(25.0, description="seconds ranks get to save and end after a signal")
    max_restarts: Natural = Field(5, description="incidents that are restarted on this node before giving up")
    checkpoint_every: CadenceText = Field("1epoch", description="how often to save; the end is always saved")
    checkpoint_keep: Count = Field(3, description="newest checkpoints to keep")
    keep_best: Annotated[str, *_BEST] | None = Field(None, description="keep the best one by this score, too")
    keep_every: Count | None = Field(None, description="keep one for every so many steps, too")
    snapshot_every: Auto | CadenceText = Field(
        "auto", description="copies in the node's memory; auto: each step on CPUs, every 5s on GPUs"
    )
    checkpoint_failures_allowed: Natural = Field(3, description="failed saves in a row before the run fails")
    resume: ResumeText = Field("auto", description="whether to go on from a checkpoint, and from which")
    init_from: Path | None = Field(None, description="weights to start from: matching keys are loaded")
    eval_every: CadenceText = Field("1epoch", description="how often to evaluate")
    log_every: CadenceText = Field("50", description="how often to log, and to write a line of metrics.jsonl")
    log_format: Literal["auto", "text", "json"] = Field(
        "auto", description="json lines or text; auto: text on a terminal"
    )
    progress: Literal["auto", "on", "off"] = Field("auto", description="progress bar; auto: on a terminal")
    tensorboard: bool = Field(False, description="write TensorBoard events (extra: tensorboard)")
    metrics_host: str = Field("127.0.0.1", description="address that /metrics listens on")
    metrics_port: Port = Field(9469, description="port of /metrics; a busy one is replaced by a free one")
    metrics_cert: Path | None = Field(None, description="certificate (PEM) to serve the metrics by TLS")
    metrics_key: Path | None = Field(None, description="its key (PEM), if it is in a file of its own")
    metrics_token_file: Path | None = Field(None, description="file with a bearer token that readers need")
    metrics_linger: NonNegative = Field(15.0, description="seconds to wait for the last scrape, if any")
    on_nonfinite: Literal["skip", "stop", "raise"] = Field(
        "stop", description="at a loss or gradients that are not finite"
    )
    replica_check_every: CadenceText = Field("1epoch", description="how often to compare the ranks' weights")
    profile: Annotated[str, *_WINDOW] | None = Field(None, description="steps to record with torch.profiler")
    download: bool = Field(False, description="let a task download its data set")
    task_fields: dict[str, str] = Field({}, description="the task's own settings: --task.NAME VALUE")

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Values come from the constructor alone: a rank must not see what its own environment says."""
        return (init_settings,)

    def to_dict(self) -> dict[str, object]:
        """Plain values that JSON can hold; `from_dict` is its inverse."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Settings":
        """Raises ConfigError, one line, for a name or a value that is not valid."""
        return _validate(values, lambda field: field)

    def digest(self) -> str:
        """Twelve hexadecimal digits that differ when any setting differs."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def fingerprint_fields(self) -> dict[str, object]:
        """What must be the same when a run is resumed, because it decides the bits."""
        return {name: getattr(self, name) for name in FINGERPRINT}


FINGERPRINT = "task task_fields seed batch_size precision strategy optimizer sync_batchnorm".split()
FIELDS = tuple(name for name in Settings.model_fields if name != "task_fields")
FLAGS = {"--" + name.replace("_", "-"): name for name in FIELDS}
SWITCHES = {flag for flag, name in FLAGS.items() if Settings.model_fields[name].annotation is bool}
NEGATED = {"--no-" + flag[2:]: FLAGS[flag] for flag in SWITCHES}
VARIABLES = {PREFIX + name.upper(): name for name in FIELDS}


class Given(NamedTuple):
    """One value as somebody wrote it. Keys of a layer are setting names, `task.NAME`, and `config`."""

    text: str
    source: str  # for `explain`: "environment TANDEM_LR"
    name: str  # for errors: "TANDEM_LR"


@dataclass(frozen=True)
class Loaded:
    """Settings, and where each is from: "flag --lr", "default"; a task's own are under `task.NAME`."""

    settings: Settings
    sources: dict[str, str]


def load(argv: Sequence[str], environ: Mapping[str, str], dotenv: Path | None = Path(".env")) -> Loaded:
    """Resolve the flags after the verb, the environment and the files into settings.

    Raises ConfigError, one line, for an unknown name (with the nearest match), a bad value or a bad file.
    """
    given = _from_dotenv(dotenv) | _from_environment(environ) | _from_flags(argv)
    config = given.pop("config", None)
    if config is not None:
        given = _from_toml(config) | given
    values: dict[str, Any] = {}
    fields: dict[str, str] = {}
    for key, value in given.items():
        if key.startswith("task."):
            fields[key.removeprefix("task.")] = value.text
        elif not value.text.strip():
            _bad_value(key, value.name, value.text)
        else:
            is_none = value.text == "none" and NoneType in get_args(Settings.model_fields[key].annotation)
            values[key] = None if is_none else value.text
    settings = _validate({**values, "task_fields": fields}, lambda key: given[key].name)
    sources = dict.fromkeys(FIELDS, "default") | {key: value.source for key, value in given.items()}
    return Loaded(settings, sources)


def _from_flags(argv: Sequence[str]) -> dict[str, Given]:
    given: dict[str, Given] = {}
    rest = list(argv)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        if not flag.startswith("-"):
            raise ConfigError(f"unexpected argument {flag!r}; settings are flags such as --epochs 4. {SEE}")
        if flag in NEGATED:
            if equals:
                raise ConfigError(f"{flag} got {text!r}, but takes no value. {SEE}")
            given[NEGATED[flag]] = Given("false", f"flag {flag}", flag)
            continue
        key = "config" if flag == "--config" else FLAGS.get(flag) or _task_key(flag, "--task.")
        if key is None:
            raise _unknown("flag", flag, [*FLAGS, *NEGATED, "--config"])
        if not equals:
            has_value = bool(rest) and not rest[0].startswith("--")
            if not has_value and flag not in SWITCHES:
                raise ConfigError(f"{flag} needs a value: {_valid_for(key)}. {SEE}")
            text = rest.pop(0) if has_value else "true"
        given[key] = Given(text, f"flag {flag}", flag)
    return given


def _task_key(name: str, prefix: str) -> str | None:
    """`--task.image-size` and `TANDEM_TASK__IMAGE_SIZE` both set the field image_size."""
    field = name.removeprefix(prefix).replace("-", "_")
    return f"task.{field}" if name.startswith(prefix) and field.isidentifier() else None


def _from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    ours = {name: text for name, text in environ.items() if not _SERVICE_LINK.match(f"{name}={text}")}
    return _from_variables(ours, lambda name: (f"environment {name}", name))


def _from_dotenv(path: Path | None) -> dict[str, Given]:
    try:
        if path is None or not path.is_file():
            return {}
        variables = dotenv_values(path, interpolate=False)  # interpolating would read os.environ
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; make it readable, or move it") from error
    return _from_variables(variables, lambda name: (path.name, f"{name} in {path.name}"))


def _from_variables(
    variables: Mapping[str, str | None], describe: Callable[[str], tuple[str, str]]
) -> dict[str, Given]:
    """An empty variable counts as not set: Compose's `${TANDEM_STEPS:-}` leaves such ones behind."""
    given: dict[str, Given] = {}
    for name in sorted(variables):
        if not name.startswith(PREFIX):
            continue
        source, label = describe(name)
        key = "config" if name == PREFIX + "CONFIG" else VARIABLES.get(name) or _task_key(name, TASK_PREFIX)
        if key is None and name not in OTHER_VARIABLES:
            raise _unknown("variable", name, [*VARIABLES, *OTHER_VARIABLES], label)
        text = variables[name]
        if key is not None and text:
            given[key.lower()] = Given(text, source, label)
    return given


def _from_toml(config: Given) -> dict[str, Given]:
    try:
        table = tomllib.loads(Path(config.text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config.name} got {config.text!r}, valid is a TOML file: {error}") from error
    task_fields = table.pop("task_fields", {})
    if not isinstance(task_fields, dict):
        raise ConfigError(f"task_fields in {config.text} got {task_fields!r}, valid is a table. {SEE}")
    for key in table:
        if key not in FIELDS:
            raise _unknown("key", key, [*FIELDS, "task_fields"], f"{key} in {config.text}")
    given: dict[str, Given] = {}
    for key, value in (table | {f"task.{name}": value for name, value in task_fields.items()}).items():
        label = f"{key} in {config.text}"
        if not isinstance(value, str | bool | int | float):
            _bad_value(key, label, value)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        given[key] = Given(text, f"config {config.text}", label)
    return given


def _validate(values: Mapping[str, Any], label: Callable[[str], str]) -> Settings:
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0])
        if key not in Settings.model_fields:
            raise _unknown("setting", key, Settings.model_fields) from None
        _bad_value(key, label(key), values[key])


def _bad_value(key: str, name: str, got: object) -> NoReturn:
    shown = repr(got) if len(repr(got)) <= 80 else repr(got)[:77] + "..."
    raise ConfigError(f"{name} got {shown}, valid is {_valid_for(key)}. {SEE}") from None


def _unknown(kind: str, name: str, known: Iterable[str], label: str | None = None) -> ConfigError:
    """The error for a name nobody knows, with the nearest known one; prefixes would make all of them near."""
    plain = {other.lower().removeprefix("tandem_").lstrip("-"): other for other in known}
    nearest = difflib.get_close_matches(name.lower().removeprefix("tandem_").lstrip("-"), plain, n=1)
    hint = f"; did you mean {plain[nearest[0]]}?" if nearest else "."
    return ConfigError(f"unknown {kind} {label or name}{hint} {SEE}")


def _valid_for(key: str) -> str:
    field = Settings.model_fields.get(key)
    if field is None:
        return "a TOML file" if key == "config" else "text, a number, true or false"
    return _valid(field.annotation, field.metadata)


def _valid(annotation: object, metadata: Iterable[object] = ()) -> str:
    for item in metadata:
        if isinstance(item, Valid):
            return item
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _valid(arguments[0], arguments[1:])
    if get_origin(annotation) is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(arguments)
    if get_origin(annotation) in (Union, UnionType):
        return ", or ".join(_valid(argument) for argument in arguments)
    names: dict[object, str] = {bool: "true or false", Path: "a path", str: "text", NoneType: "none"}
    return names.get(annotation, "a table of text")


def _shown(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def explain(loaded: Loaded) -> str:
    """A table for people: name, value and source of every setting."""
    settings = loaded.settings
    rows = [(name, _shown(getattr(settings, name)), loaded.sources[name]) for name in FIELDS]
    for name, text in settings.task_fields.items():
        rows.append((f"task.{name}", text, loaded.sources[f"task.{name}"]))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in rows)


def markdown_table() -> str:
    """The table of docs/configuration.md: every flag, its variable, default, valid values and meaning."""
    lines = ["| flag | variable | default | valid | meaning |", "|---|---|---|---|---|"]
    for flag, name in FLAGS.items():
        field = Settings.model_fields[name]
        cells = [f"`{flag}`", f"`{PREFIX}{name.upper()}`", f"`{_shown(field.default)}`", _valid_for(name)]
        lines.append(f"| {' | '.join(cells)} | {field.description} |")
    lines.append("| `--task.NAME` | `TANDEM_TASK__NAME` | | text | the task's own settings |")
    lines.append("| `--config` | `TANDEM_CONFIG` | | a TOML file | `name = value` lines, `[task_fields]` |")
    return "\n".join(lines) + "\n"
