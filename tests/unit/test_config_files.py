"""`--config`: TOML and YAML, with sections or without."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from patience import patient
from tandem.config import SETTINGS, SLICES, Parser, Settings, as_toml, resolve
from tandem.config.sources import FIELDS, Loaded
from tandem.errors import ConfigError

GROUPS = {name: each.slice for name, each in SETTINGS.items()}
OPTIMIZER = GROUPS["lr"]


def load(path: Path, text: str) -> Loaded:
    path.write_text(text, encoding="utf-8")
    return resolve(Parser("launch", "", "").read(["--config", str(path)]).given, {}, None)


def refused(path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, text)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "flat.toml",
            'lr = 0.5\nbatch_size = 96\nsteps = "none"\nprogress = "on"\n[task_fields]\nwidth = 3\n',
        ),
        (
            "sections.toml",
            f'[{OPTIMIZER}]\nlr = 0.5\n[data]\nbatch_size = 96\n[run]\nsteps = "none"\n'
            '[run.task_fields]\nwidth = 3\n[telemetry]\nprogress = "on"\n',
        ),
        ("flat.yaml", "lr: 0.5\nbatch_size: 96\nsteps: null\nprogress: on\ntask_fields:\n  width: 3\n"),
        (
            "sections.yml",
            f"# a comment\n{OPTIMIZER}:\n  lr: 5e-1\ndata: {{batch_size: 96}}\nrun:\n  steps: ~\n"
            "telemetry:\n  progress: on\nmetrics:\ntask_fields: {width: 3}\n",
        ),
        (
            "mixed.yaml",
            f"batch_size: 96\n{OPTIMIZER}: {{lr: 0.5}}\nprogress: 'on'\nrun: {{task_fields: {{width: 3}}}}",
        ),
    ],
)
def test_the_same_settings_in_every_form(tmp_path: Path, name: str, text: str) -> None:
    loaded = load(tmp_path / name, text)
    expected = Settings().replace(lr=0.5, batch_size=96, progress="on", task_fields={"width": "3"})
    assert loaded.settings == expected
    assert loaded.sources["lr"] == f"config {tmp_path / name}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", 'metrics = "9500"'),
        ("b.toml", '[metrics]\nmetrics = "9500"'),
        ("c.yaml", "metrics: 9500"),
        ("d.yaml", "metrics: {metrics: 9500}"),
    ],
)
def test_a_section_and_its_setting_may_have_one_name(tmp_path: Path, name: str, text: str) -> None:
    assert load(tmp_path / name, text).settings.metrics.host_and_port == ("127.0.0.1", 9500)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.toml", "[data]\nlr = 0.5", f"data.lr in {{file}}: lr belongs in the section {OPTIMIZER}"),
        ("a.yaml", "data: {lr: 0.5}", f"data.lr in {{file}}: lr belongs in the section {OPTIMIZER}"),
        ("a.toml", "[data]\nbatchsize = 2", "unknown key batchsize in {file}; did you mean batch_size?"),
        ("a.toml", "[dat]\nbatch_size = 2", "unknown key dat in {file}; did you mean data"),
        ("a.toml", "data = 2", "data in {file}: invalid value 2; expected a section"),
        ("a.toml", "lr = 1\n" + f"[{OPTIMIZER}]\nlr = 2", "lr in {file}: set twice"),
        ("a.yaml", "lr: 1\nlr: 2", "--config: invalid value '{file}'; expected "),
        ("a.yaml", "lr: [1, 2]", "lr in {file}: invalid value ['1', '2']"),
        ("a.yaml", "epochs: null", "epochs in {file}: invalid value 'none'"),
        ("a.yaml", "epochs: 2.5", "epochs in {file}: invalid value '2.5'"),
        ("a.yaml", "task_fields: {a: null}", "task.a in {file}: invalid value None"),
        ("a.yaml", "task_fields: {a: {b: {c: 1}}}", "--config: invalid value '{file}'; expected "),
        ("a.yaml", "&a [*a]", "--config: invalid value '{file}'; expected "),
        ("a.yaml", "lr: *gone", "--config: invalid value '{file}'; expected "),
        ("a.yaml", "- lr", "--config: invalid value '{file}'; expected "),
        ("a.yaml", "{", "--config: invalid value '{file}'; expected "),
        ("a.yaml", "? [1]\n: 2", "--config: invalid value '{file}'; expected "),
        ("a.yaml", "a: 1\n---\nb: 2", "--config: invalid value '{file}'; expected "),
    ],
)
def test_a_mistake_in_a_file_is_one_line(tmp_path: Path, name: str, text: str, expected: str) -> None:
    path = tmp_path / name
    assert refused(path, text).startswith(expected.format(file=path))


def test_a_missing_file_is_named_without_the_number_of_its_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(Parser("launch", "", "").read(["--config", str(tmp_path / "none.toml")]).given, {}, None)
    assert "none.toml" in str(caught.value) and "Errno" not in str(caught.value)


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    for name in ("a.toml", "a.yaml"):
        assert load(tmp_path / name, "").settings == Settings()


def test_the_printed_file_shows_defaults_as_comments(tmp_path: Path) -> None:
    lines = as_toml(Settings().replace(lr=0.5), {"epochs"}).splitlines()
    assert [line for line in lines if line and line[0] not in "#["] == ["epochs = 4", "lr = 0.5"]
    assert [line[1:].partition("]")[0] for line in lines if line.startswith("[")] == [*SLICES, "task_fields"]
    text = "\n".join(line.removeprefix("# ") for line in lines[1:])
    loaded = load(tmp_path / "all.toml", text)  # every comment is a valid line
    assert loaded.settings == Settings().replace(lr=0.5) and loaded.chosen == set(FIELDS)


def test_config_json_is_flat(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert load(path, json.dumps({"lr": 0.5, "data": 3})).settings.value("lr") == 0.5


def test_yaml_is_imported_only_for_yaml() -> None:
    code = "import sys, tandem.cli; tandem.cli.parser_of('launch'); sys.exit('yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=patient(60)).returncode == 0
