"""Names and values that earlier versions had: the error says what to type; old files work."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoint.decision import decide_resume
from tandem.checkpoint.store import CheckpointStore
from tandem.config import Settings, resolve
from tandem.config.arguments import Parser
from tandem.config.removed import REMOVED, REMOVED_VALUES, translated
from tandem.config.settings import SETTINGS
from tandem.errors import ConfigError


def read(*words: str) -> Any:
    return Parser("train", "[settings]", "").read(words).given


def line_of(error: pytest.ExceptionInfo[ConfigError], label: str, name: str, form: str) -> None:
    text = str(error.value)
    assert text.startswith(f"{label}: ") and "was removed; " in text and "\n" not in text
    assert not name or form in text, text


def test_there_are_at_most_73_settings_and_none_is_also_removed() -> None:
    assert len(SETTINGS) <= 73, "at most 73 settings: CONTRIBUTING.md says what to do instead of adding one"
    assert not REMOVED.keys() & SETTINGS.keys()
    assert all(not row.name or row.name in SETTINGS for row in [*REMOVED.values(), *REMOVED_VALUES.values()])


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_name_says_what_to_type_instead(name: str, tmp_path: Path) -> None:
    new = REMOVED[name].name
    flag, variable = f"--{name.replace('_', '-')}", f"TANDEM_{name.upper()}"
    for words in ([flag, "1"], [f"{flag}=1"], [flag]):
        with pytest.raises(ConfigError) as error:
            read(*words)
        line_of(error, flag, new, f"use --{new.replace('_', '-')}")
    with pytest.raises(ConfigError) as error:
        resolve({}, {variable: "1"})
    line_of(error, variable, new, f"use TANDEM_{new.upper()}=")
    assert resolve({}, {variable: ""}, None).settings == Settings(), "Compose leaves empty ones behind"
    dotenv = tmp_path / ".env"
    dotenv.write_text(f"{variable}=1\n")
    with pytest.raises(ConfigError) as error:
        resolve({}, {}, dotenv)
    line_of(error, f"{variable} in .env", new, f"use TANDEM_{new.upper()}=")
    config = tmp_path / "run.toml"
    config.write_text(f"{name} = 1\n")
    with pytest.raises(ConfigError) as error:
        resolve({}, {"TANDEM_CONFIG": str(config)}, None)
    line_of(error, f"{name} in {config}", new, f"use {new} = ")
    with pytest.raises(ConfigError, match="was removed"):
        Settings.from_dict({name: 1})


@pytest.mark.parametrize(("name", "text"), REMOVED_VALUES)
def test_a_removed_value_says_what_to_type_instead(name: str, text: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError) as error:
        resolve(read(flag, text), {}, None)
    line_of(error, flag, flag, f"use {flag}")
    with pytest.raises(ConfigError) as error:
        resolve({}, {f"TANDEM_{name.upper()}": text}, None)
    line_of(error, f"TANDEM_{name.upper()}", name, f"use TANDEM_{name.upper()}=")


def test_the_config_of_an_older_run_is_read(tmp_path: Path) -> None:
    old = Settings().to_dict() | OLD
    config = tmp_path / "config.json"
    config.write_text(json.dumps(old))
    assert Settings.from_dict(old, tolerant=True) == Settings().replace(**NEW)
    loaded = resolve({}, {"TANDEM_CONFIG": str(config)}, None)
    assert loaded.settings == Settings().replace(**{name: NEW[name] for name in NEW if name != "master"})
    assert translated(translated(old)) == translated(old), "what is new already stays as it is"


def test_a_checkpoint_of_an_older_run_is_resumed(tmp_path: Path) -> None:
    settings = Settings().replace(**NEW, steps=9)
    old = Settings().to_dict() | OLD | {"steps": 9}
    fixed = [*settings.fingerprint_fields(), "powersgd_rank"]
    store = CheckpointStore(tmp_path / "checkpoints")
    fingerprint = {name: old[name] for name in fixed}
    store.save(4, b"state", {"settings": old, "fingerprint": fingerprint, "train_samples": 2400})
    decision = decide_resume(settings, store)
    assert (decision.kind, decision.step, decision.changes) == ("resume", 4, ())
    other = settings.replace(gradient_compression="powersgd:3")
    with pytest.raises(ConfigError, match="gradient_compression was powersgd:2 and is powersgd:3 now"):
        decide_resume(other, store)


def test_the_hash_of_settings_tells_merged_settings_apart() -> None:
    hashes = {Settings().replace(metrics=f"127.0.0.1:{port}").digest() for port in (1, 2, 2)}
    assert len(hashes) == 2


OLD: dict[str, Any] = {
    "run_mode": "private", "run_name": None, "batch_shares": "auto", "warmup_mode": "linear",
    "warmup_factor": 0.1, "clip_value": None, "dist_bn": "broadcast", "static_graph": False,
    "elastic_settle": 10.0, "lr_scaling": "auto", "lr_base_batch_size": 32, "strategy": "dp",
    "dp_first_share": 0.5, "compile": True, "compile_mode": "reduce-overhead",
    "gradient_compression": "powersgd", "powersgd_rank": 2, "checkpoint_failures_allowed": 3,
    "init_method": "tcp://n0:7", "connect_timeout": 300.0, "first_step_timeout": 7.0, "max_starts": 3,
    "cold": True, "standby_gpu": True, "init_min": 0.9, "tensorboard": True, "tracker": "mlflow",
    "metrics_host": "::", "metrics_port": 7, "metrics_cert": "a.pem", "metrics_key": "b.pem",
    "log_format": "auto", "on_nonfinite": "raise",
}  # fmt: skip
NEW: dict[str, Any] = {
    "lr_scaling": "linear:32", "strategy": "dp:0.5", "compile": "reduce-overhead",
    "gradient_compression": "powersgd:2", "master": "n0:7", "phase_timeout": 7.0, "max_crash_loops": 3,
    "fresh_interpreter": True, "warm_gpu": True, "init_strict": True, "tracker": "tensorboard,mlflow",
    "metrics": "[::]:7", "metrics_tls": "a.pem,b.pem",
}  # fmt: skip
