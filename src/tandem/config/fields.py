"""Define the parts of a setting: its type, valid values, description, and which nodes must agree on it."""

import dataclasses
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from tandem.config.address import WEBHOOK_VALID, Webhook, address, from_home
from tandem.schedule import CADENCE_VALID, Cadence, in_seconds

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema


@dataclasses.dataclass(frozen=True)
class Constraint:
    """Which values are valid: a phrase for errors, help and docs, and a test of the converted value."""

    words: str
    holds: Callable[[Any], bool] = lambda value: True

    def __get_pydantic_core_schema__(self, source: Any, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        # Import it here, like pydantic below: `--help` describes all types and converts no value.
        from pydantic_core.core_schema import no_info_after_validator_function

        def check(value: Any) -> Any:
            if not self.holds(value):
                raise ValueError(self.words)
            return value

        return no_info_after_validator_function(check, handler(source))


@dataclasses.dataclass(frozen=True)
class Rewrites:
    """Converts alternative spellings of a value to one form, before validation."""

    change: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        from pydantic_core.core_schema import no_info_before_validator_function

        return no_info_before_validator_function(self.change, handler(source))


@dataclasses.dataclass(frozen=True)
class Parsed:
    """Converts and validates a value with `parse` alone, which raises ValueError for an invalid one."""

    parse: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        from pydantic_core.core_schema import no_info_plain_validator_function

        return no_info_plain_validator_function(self.parse)


def _path_or_url(value: Any) -> PurePath:
    if not isinstance(value, str | PurePath):
        raise ValueError("a path")
    return address(value)


def _is_cadence(text: str, not_in: str = "") -> bool:
    try:
        return Cadence.parse(text).unit != not_in
    except ValueError:
        return False


def _is_resume(text: str) -> bool:
    # A path object is always true. The call is for the ConfigError about a bad address.
    return bool(address(text))


def _is_address(text: str, lowest: int = 1) -> bool:
    # ASCII, because \d and \w also match digits and letters of other scripts, which a resolver rejects.
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})", text, re.ASCII)
    return found is not None and lowest <= int(found[2]) <= 65535


def _listening(text: str) -> str:
    """Add the loopback address to a port without a host."""
    return f"127.0.0.1:{text.removeprefix(':')}" if re.fullmatch(r":?\d+", text, re.ASCII) else text


def _ends_in_tensorboard(value: Any) -> bool:
    # Both orders of two trackers mean the same, so one order becomes the stored form.
    return isinstance(value, str) and value.endswith(",tensorboard")


def _is_pair(text: str, is_valid: Callable[[int, int], bool]) -> bool:
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text, re.ASCII)
    return found is not None and is_valid(int(found[1]), int(found[2]))


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def _compile_mode(value: Any) -> Any:
    """Accept true and false like a switch: the default mode, and none."""
    text = str(value).lower()
    if text in ("true", "1", "yes", "on"):
        return "default"
    return None if text in ("false", "0", "no", "off", "none") else value


Auto = Literal["auto"]
Count = Annotated[int, Constraint("an integer >= 1", lambda n: n >= 1)]
Natural = Annotated[int, Constraint("an integer >= 0", lambda n: n >= 0)]
# NumPy accepts only seeds of 32 bits.
Seed = Annotated[int, Constraint("an integer from 0 to 4294967295", lambda n: 0 <= n < 2**32)]
Port = Annotated[int, Constraint("a port from 0 (any free port) to 65535", lambda n: 0 <= n <= 65535)]
Positive = Annotated[float, Constraint("a number > 0", lambda x: x > 0)]
NonNegative = Annotated[float, Constraint("a number >= 0", lambda x: x >= 0)]
Seconds = Annotated[
    float, Rewrites(in_seconds), Constraint("seconds > 0, such as 90, 90s or 5m", lambda x: x > 0)
]
SecondsOrZero = Annotated[
    float, Rewrites(in_seconds), Constraint("seconds >= 0, such as 15, 15s or 1m", lambda x: x >= 0)
]
BelowOne = Annotated[float, Constraint("a number >= 0 and < 1", lambda x: 0 <= x < 1)]
CadenceText = Annotated[str, Constraint(CADENCE_VALID, _is_cadence)]
WarmupText = Annotated[
    str,
    Constraint("steps, epochs or percent such as 0, 200, 1epoch or 5%", lambda s: _is_cadence(s, "seconds")),
]
PathOrUrl = Annotated[PurePath, Parsed(_path_or_url)]
LocalPath = Annotated[Path, Rewrites(lambda value: from_home(value) if isinstance(value, str) else value)]
MeetingPoint = Annotated[
    str,
    Rewrites(lambda value: value.removeprefix("tcp://") if isinstance(value, str) else value),
    # Port 0 is invalid here: the other nodes could not know which port node 0 got.
    Constraint("HOST:PORT or file:///PATH", lambda text: _is_address(text) or text[:8] == "file:///"),
]
Listening = Annotated[
    str,
    Rewrites(lambda value: _listening(str(value))),
    Constraint("HOST:PORT or PORT; port 0 is any free port", lambda text: _is_address(text, lowest=0)),
]
WebhookUrl = Annotated[Webhook, Parsed(Webhook.parse), Constraint(WEBHOOK_VALID)]
Certificate = Annotated[str, Constraint("CERT or CERT,KEY, PEM files", _matches(r"[^,]+(,[^,]+)?"))]
TrackerNames = Annotated[
    str,
    Rewrites(lambda value: ",".join(reversed(value.split(","))) if _ends_in_tensorboard(value) else value),
    Constraint("tensorboard,mlflow or tensorboard,wandb", _matches("tensorboard,(mlflow|wandb)")),
]
NodeRange = Annotated[
    str, Constraint("MIN:MAX nodes, such as 1:4", lambda s: _is_pair(s, lambda low, high: 1 <= low <= high))
]
StepWindow = Annotated[
    str, Constraint("START:STEPS, such as 10:5", lambda s: _is_pair(s, lambda _start, steps: steps >= 1))
]
BestText = Annotated[
    str, Constraint("METRIC, METRIC:min or METRIC:max, such as accuracy", _matches(r"[^\s:]+(:(min|max))?"))
]
SharesText = Annotated[
    str,
    Constraint(
        "two or more numbers > 0, one per rank, such as 3:1",
        _matches(r"(?=[^:]*[1-9])[0-9]{1,9}(\.[0-9]{1,9})?(:(?=[^:]*[1-9])[0-9]{1,9}(\.[0-9]{1,9})?)+"),
    ),
]
CompileMode = Annotated[
    Literal["default", "reduce-overhead", "max-autotune"] | None,
    Rewrites(_compile_mode),
    Constraint("default, reduce-overhead, max-autotune, or none"),
]
LrScalingText = Annotated[
    str,
    Constraint("linear:BATCH or sqrt:BATCH, such as linear:240", _matches(r"(linear|sqrt):[1-9][0-9]{0,8}")),
]
DpShare = Annotated[
    str,
    Constraint(
        "dp:SHARE with a share > 0 and <= 1, such as dp:0.5", _matches(r"dp:(0\.[0-9]*[1-9][0-9]*|1)")
    ),
]
PowerSgd = Annotated[
    Literal["powersgd"] | str,
    # Rank 4 is the default. Store one spelling, because a resume compares this setting as text.
    Rewrites(lambda value: "powersgd" if value == "powersgd:4" else value),
    Constraint("powersgd or powersgd:RANK", _matches(r"powersgd(:[1-9][0-9]{0,8})?")),
]
ResumeText = Annotated[str, Constraint("auto, never, required or PATH[@STEP]", _is_resume)]


PLACEHOLDERS = {
    "task": "FILE.py:CLASS", "task_fields": "VALUE", "batch_shares": "A:B[:C...]", "elastic": "MIN:MAX",
    "profile": "START:STEPS", "metrics": "HOST:PORT", "metrics_tls": "CERT[,KEY]",
    "resume": "{auto,never,required,PATH[@STEP]}", "warmup": "LENGTH", "keep_best": "METRIC[:min|:max]",
    "master": "HOST:PORT", "notify": "URL",
}  # fmt: skip
SHORT = {
    "a cadence": "CADENCE",
    "a port": "PORT",
    "HOST:PORT": "HOST:PORT",
    "an integer": "N",
    "a number": "X",
    "seconds": "SECONDS",
    "a path": "PATH",
}
"""Placeholders by a phrase in `Setting.valid`; the first match is used."""


def setting(
    default: Any, description: str, *, fixed: bool = False, per_node: bool = False, bare: str | None = None
) -> Any:
    """Declare one field of a slice.

    fixed: the value affects the results bit for bit, so a resumed run must have the same. per_node: nodes of
    one run may differ. bare: the value of the flag when given without one; every bool has such a flag.
    """
    metadata = {"description": description, "fixed": fixed, "per_node": per_node, "bare": bare}
    if isinstance(default, dict):
        # dataclasses rejects a mutable default.
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def placeholder(valid: str) -> str:
    """Return the placeholder of a value in help, from its valid values: `N`, `PATH`, `{fp32,bf16}`."""
    valid = valid.removesuffix(", or none")
    if valid.startswith("one of "):
        return "{" + valid.removeprefix("one of ").replace(", ", ",") + "}"
    return next((short for words, short in SHORT.items() if words in valid), "TEXT")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field of a slice, as seen by flags, variables, files and docs."""

    name: str
    slice: str
    annotation: Any
    default: object
    description: str
    fixed: bool
    per_node: bool
    bare: str | None = None
    """The value of the flag when it is given without one."""

    @property
    def is_table(self) -> bool:
        """True for the task's own settings: one entry per flag `--task.NAME`."""
        return bool(self.annotation == dict[str, str])

    @property
    def flag(self) -> str:
        """The flag, such as `--batch-size`."""
        return "--task.NAME" if self.is_table else "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable, such as `TANDEM_BATCH_SIZE`."""
        return "TANDEM_" + ("TASK__NAME" if self.is_table else self.name.upper())

    @property
    def is_switch(self) -> bool:
        """True if the flag needs no value and has a `--no-` counterpart."""
        return self.bare is not None

    @property
    def placeholder(self) -> str:
        return PLACEHOLDERS.get(self.name) or placeholder(self.valid)

    @property
    def valid(self) -> str:
        """A phrase that describes the valid values."""
        return words_of(self.annotation)


def settings_of(slice_name: str, model: type) -> list[Setting]:
    """Return the settings of one slice, in declaration order."""
    found = []
    for each in dataclasses.fields(model):
        # Only a table has a default_factory instead of a default, and it starts empty.
        default = {} if each.default is dataclasses.MISSING else each.default
        bare = {"bare": "true"} if each.type is bool else {}
        found.append(Setting(each.name, slice_name, each.type, default, **{**each.metadata, **bare}))
    return found


@lru_cache
def _adapter(annotation: Any) -> "TypeAdapter[Any]":
    # Import it here, because importing pydantic takes longer than a help page should take.
    from pydantic import ConfigDict, TypeAdapter

    # An infinite number passes `> 0`, and JSON cannot store it.
    return TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))


def convert(annotation: Any, value: object) -> Any:
    """Convert text or a JSON value to the type; "none" gives None if that is valid. Raises ValueError."""
    # Check this before pydantic, which would accept the word "none" as a path or text.
    if value == "none" and NoneType in get_args(annotation):
        return None
    return _adapter(annotation).validate_python(value)


def words_of(annotation: Any) -> str:
    """Return a phrase that describes the valid values of a type."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return next(
            (item.words for item in arguments if isinstance(item, Constraint)), words_of(arguments[0])
        )
    if get_origin(annotation) is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(arguments)
    if get_origin(annotation) in (Union, UnionType):
        return ", or ".join(words_of(argument) for argument in arguments)
    names: dict[object, str] = {bool: "true or false", str: "text", NoneType: "none"}
    names |= {Path: "a path", PurePath: "a path"}
    return names.get(annotation, "text, a number, true or false")


def words_in(annotation: Any) -> tuple[str, ...]:
    """Return the words of the Literals in a type: `Literal["auto"] | int` -> ("auto",)."""
    if get_origin(annotation) is Literal:
        return tuple(each for each in get_args(annotation) if isinstance(each, str))
    return tuple(word for part in get_args(annotation) for word in words_in(part))


def plain(value: object) -> str:
    """Format a value as a user would type it."""
    # No single flag can express a table, so help shows no default for one.
    if value == {}:
        return ""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
