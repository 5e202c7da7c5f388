"""All settings together: flat for sources and files, in slices for the components."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple, NoReturn

from tandem.config import slices
from tandem.config.address import HIDDEN, hide, is_secret
from tandem.config.fields import Setting, convert, settings_of, words_of
from tandem.config.removed import removed_name_message, translated
from tandem.errors import ConfigError
from tandem.text import did_you_mean, nearest

LONGEST = 1000
SEE = "See `tandem config --explain`"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The resolved settings of a run.

    Immutable; reads no source itself, `sources.resolve` provides the values.
    """

    run: slices.RunConfig = slices.RunConfig()
    data: slices.DataConfig = slices.DataConfig()
    optimization: slices.OptimizationConfig = slices.OptimizationConfig()
    compute: slices.ComputeConfig = slices.ComputeConfig()
    exchange: slices.ExchangeConfig = slices.ExchangeConfig()
    launch: slices.LaunchConfig = slices.LaunchConfig()
    reliability: slices.ReliabilityConfig = slices.ReliabilityConfig()
    checkpoint: slices.CheckpointConfig = slices.CheckpointConfig()
    evaluation: slices.EvaluationConfig = slices.EvaluationConfig()
    telemetry: slices.TelemetryConfig = slices.TelemetryConfig()
    metrics: slices.MetricsConfig = slices.MetricsConfig()

    def to_dict(self) -> dict[str, object]:
        """Return flat plain values for JSON; `from_dict` is the inverse."""
        values = {name: self.value(name) for name in SETTINGS}
        return {name: str(value) if isinstance(value, PurePath) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, tolerant: bool = False) -> "Settings":
        """Create settings from flat values, as `to_dict` returns them; missing ones get their defaults.

        tolerant: ignore unknown settings, for a file that another version wrote. Raises a one-line
        ConfigError for an invalid name or value.
        """
        if tolerant:
            values = {name: value for name, value in translated(values).items() if name in SETTINGS}
        for name in values:
            if name not in SETTINGS:
                if gone := removed_name_message("setting", name):
                    raise ConfigError(gone)
                raise unknown("setting", name, SETTINGS)
        typed = {name: checked(SETTINGS[name].annotation, name, value) for name, value in values.items()}
        return cls().replace(**typed)

    def replace(self, **changes: Any) -> "Settings":
        """Return a copy with the given values, by flat name, without validation."""
        by_slice: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            by_slice.setdefault(SETTINGS[name].slice, {})[name] = value
        changed = {name: dataclasses.replace(getattr(self, name), **new) for name, new in by_slice.items()}
        return dataclasses.replace(self, **changed)

    def value(self, name: str) -> Any:
        """Return the value of a setting by its flat name."""
        return getattr(getattr(self, SETTINGS[name].slice), name)

    def digest(self) -> str:
        """Return twelve hexadecimal digits that change if any setting changes."""
        import hashlib  # 10 ms that a help page does not need

        # Sort them, so that moving a line in `slices` does not change the digest.
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def fingerprint_fields(self) -> dict[str, object]:
        """Return the values that must not change when a run resumes, because they affect the bits."""
        return {name: self.value(name) for name, setting in SETTINGS.items() if setting.fixed}

    def common_fields(self) -> dict[str, object]:
        """Return the values that must be the same on all nodes of a run."""
        return {name: value for name, value in self.to_dict().items() if not SETTINGS[name].per_node}


class TaskJob(NamedTuple):
    """A task rank's job: the settings from `to_dict`, and the names of those that a user set."""

    settings: dict[str, object]
    chosen: frozenset[str] = frozenset()


SLICES: dict[str, type] = {each.name: each.type for each in dataclasses.fields(Settings)}  # type: ignore[misc]
SETTINGS: dict[str, Setting] = {
    each.name: each for name, model in SLICES.items() for each in settings_of(name, model)
}


def checked(annotation: Any, label: str, value: object) -> Any:
    """Convert and validate a value; `label` names its origin in the error. Raises a one-line ConfigError."""
    try:
        return convert(annotation, value)
    except ValueError:
        bad_value(label, value, words_of(annotation))


def bad_value(label: str, got: object, valid: str) -> NoReturn:
    """Raise a one-line ConfigError with the value, what was expected, and where to look."""
    # A user may have put a token into the wrong variable, so even an invalid value may be a secret.
    value = HIDDEN if is_secret(label.partition(" ")[0]) else hide(repr(got)[:LONGEST])
    shown = value if len(value) <= 80 else value[:77] + "..."
    raise ConfigError(f"{label}: invalid value {shown}; expected {valid}. {SEE}") from None


def unknown(
    kind: str,
    name: str,
    known: Iterable[str],
    label: str | None = None,
    see: str = SEE,
    suggestion: str | None = None,
) -> ConfigError:
    """Return the error for an unknown name, with the nearest known one.

    Names are compared without their common prefixes, which would make all of them similar. `suggestion`: the
    known equivalent, if there is one.
    """
    plain = {other.lower().removeprefix("tandem_").lstrip("-"): other for other in known}
    near = nearest(name.lower().removeprefix("tandem_").lstrip("-"), plain)
    suggestion = suggestion or (plain[near] if near else None)
    return ConfigError(f"unknown {kind} {label or name}{did_you_mean(suggestion, '.')} {see}")
