"""Where values come from, and what is said about those that cannot be."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.config import SETTINGS, Parser, Settings, as_toml, explain, markdown, resolve
from tandem.config.removed import BROUGHT_ALONG
from tandem.config.sources import FIELDS, Loaded
from tandem.errors import ConfigError

FLAGS = [SETTINGS[name].flag for name in FIELDS]


def load(argv: Sequence[str], environ: Mapping[str, str], dotenv: Path | None) -> Loaded:
    """As a verb without options of its own reads them."""
    return resolve(Parser("launch", "", "").read(argv).given, environ, dotenv)


def settings_of(*argv: str, **environ: str) -> Settings:
    return load(argv, environ, None).settings


def message_of(*argv: str, environ: Mapping[str, str] | None = None, dotenv: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(argv, environ or {}, dotenv)
    message = str(caught.value)
    assert "\n" not in message and "pydantic" not in message
    assert caught.value.exit_code == 2
    return message


def test_defaults_are_valid() -> None:
    loaded = load([], {}, None)
    assert loaded.settings == Settings()
    assert set(loaded.sources) == set(FIELDS)
    assert set(loaded.sources.values()) == {"default"}
    for name in FIELDS:  # defaults are not validated by construction, so hand them in
        Settings.from_dict({name: loaded.settings.value(name)})


def test_precedence_and_sources(tmp_path: Path) -> None:
    config, dotenv = tmp_path / "run.toml", tmp_path / ".env"
    config.write_text("epochs = 1\nlr = 1\nseed = 1\nworkers = 1\n")
    dotenv.write_text(f"TANDEM_EPOCHS=2\nTANDEM_LR=2\nTANDEM_SEED=2\nTANDEM_CONFIG={config}\nOTHER=x\n")
    environ = {"TANDEM_EPOCHS": "3", "TANDEM_LR": "3", "PATH": "/bin"}
    loaded = load(["--epochs", "4"], environ, dotenv)
    chosen = loaded.settings
    found = [chosen.value(name) for name in ("epochs", "lr", "seed", "workers", "momentum")]
    assert found == [4, 3.0, 2, 1, 0.9]
    assert loaded.sources["epochs"] == "flag --epochs"
    assert loaded.sources["lr"] == "environment TANDEM_LR"
    assert loaded.sources["seed"] == ".env"
    assert loaded.sources["workers"] == f"config {config}"
    assert loaded.sources["momentum"] == "default"


def test_dotenv_beats_a_config_file_however_that_is_named(tmp_path: Path) -> None:
    config, dotenv = tmp_path / "run.toml", tmp_path / ".env"
    config.write_text("seed = 1\nlr = 1\nworkers = 1\n[task_fields]\nwidth = 1\n")
    dotenv.write_text("TANDEM_SEED=2\nTANDEM_LR=2\nTANDEM_TASK__WIDTH=2\n")
    for argv, environ in ((["--config", str(config)], {}), ([], {"TANDEM_CONFIG": str(config)})):
        loaded = load([*argv, "--lr", "3"], environ, dotenv)
        assert [loaded.settings.value(name) for name in ("seed", "lr", "workers")] == [2, 3.0, 1]
        assert loaded.settings.run.task_fields == {"width": "2"}
        assert loaded.sources["seed"] == ".env" and loaded.sources["workers"] == f"config {config}"


@given(st.permutations(range(4)), st.integers(0, 4))
def test_the_strongest_source_wins(values: list[int], sources: int) -> None:
    argv = [f"--seed={values[0]}"] if sources > 0 else []
    argv += ["--seed", str(values[1])] if sources > 1 else []
    environ = {"TANDEM_SEED": str(values[2])} if sources > 2 else {}
    expected = values[1] if sources > 1 else values[0] if sources > 0 else 0
    assert load(argv, environ, None).settings.run.seed == expected


def test_the_home_directory_is_expanded_where_no_shell_does_it(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text("TANDEM_RUN_DIR=~/runs/a\n")
    argv = ["--data-dir=~/data", "--init-from=~", "--metrics-token-file=~/token"]
    settings = load(argv, {}, dotenv).settings
    found = [settings.value(name) for name in ("data_dir", "run_dir", "init_from", "metrics_token_file")]
    assert found == [Path.home() / "data", Path.home() / "runs/a", Path.home(), Path.home() / "token"]
    assert settings_of("--data-dir=a/~/b").value("data_dir") == Path("a/~/b")


def test_flag_forms() -> None:
    assert settings_of("--lr=0.5").optimization.lr == settings_of("--lr", "0.5").optimization.lr == 0.5
    assert settings_of("--run-dir=a=b").run.run_dir == Path("a=b")
    for argv in (["--compile"], ["--compile", "true"], ["--compile=1"], ["--compile", "--lr", "1"]):
        assert settings_of(*argv).compute.compile
    for argv in (["--no-compile"], ["--compile", "false"], ["--compile=no"]):
        assert not settings_of(*argv, TANDEM_COMPILE="true").compute.compile
    for argv in (["--compile", "reduce-overhead"], ["--compile=reduce-overhead"]):
        assert settings_of(*argv).compute.compile == "reduce-overhead"


def test_none_resets_what_may_be_none() -> None:
    assert settings_of("--steps", "none", TANDEM_STEPS="5").run.steps is None
    assert "--epochs: invalid value 'none'" in message_of("--epochs", "none")


def test_empty_variables_count_as_not_set(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text("TANDEM_EPOCHS=7\nTANDEM_LR=\nTANDEM_SEED\n")
    assert load([], {"TANDEM_EPOCHS": "", "TANDEM_STEPS": ""}, dotenv).settings.run.epochs == 7


def test_dotenv_is_not_interpolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    monkeypatch.setenv("TANDEM_EPOCHS", "9")
    dotenv = tmp_path / ".env"
    dotenv.write_text("TANDEM_RUN_DIR=${SECRET}\n")
    loaded = load([], {}, dotenv)
    assert loaded.settings.run.run_dir == Path("${SECRET}")
    assert loaded.settings.run.epochs == Settings().run.epochs == 4


def test_task_fields_are_merged_per_name(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[task_fields]\ndepth = 2\nwidth = 8\nflip = true\nname = "a"\n')
    argv = ["--config", str(config), "--task.depth", "4", "--task.image-size=28"]
    loaded = load(argv, {"TANDEM_TASK__DEPTH": "3", "TANDEM_TASK__WIDTH": "16"}, None)
    fields = {"depth": "4", "image_size": "28", "width": "16", "flip": "true", "name": "a"}
    assert loaded.settings.run.task_fields == fields
    assert loaded.sources["task.depth"] == "flag --task.depth"
    assert loaded.sources["task.width"] == "environment TANDEM_TASK__WIDTH"
    assert loaded.sources["task.flip"] == f"config {config}"


def test_kubernetes_service_links_are_not_ours() -> None:
    links = {
        "TANDEM_METRICS_SERVICE_HOST": "10.0.0.1",
        "TANDEM_METRICS_SERVICE_PORT_HTTP": "19469",
        "TANDEM_METRICS_PORT": "tcp://10.0.0.1:19469",
        "TANDEM_METRICS_PORT_19469_TCP_ADDR": "10.0.0.1",
        "TANDEM_PORT": "tcp://10.0.0.1:19469",
    }
    assert settings_of(**links).metrics.metrics == "127.0.0.1:19469"
    assert settings_of(TANDEM_METRICS="9470").metrics.host_and_port == ("127.0.0.1", 9470)
    assert settings_of(TANDEM_METRICS=":0").metrics.host_and_port == ("127.0.0.1", 0)
    assert settings_of(TANDEM_METRICS="[::]:7").metrics.host_and_port == ("::", 7)


@pytest.mark.parametrize(
    "name", ["TANDEM_STATE_DIR", "TANDEM_REQUIRE", "TANDEM_TRIALS", "TANDEM_COMPOSE_NODES"]
)
def test_variables_read_elsewhere_are_known(name: str) -> None:
    assert settings_of(**{name: "x"}) == Settings()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--epoch", "3"], "unknown flag --epoch; did you mean --epochs? See `tandem config --explain`"),
        (["--batch_size=3"], "unknown flag --batch_size; did you mean --batch-size?"),
        (["-lr", "3"], "unknown flag -lr; did you mean --lr?"),
        (["--no-compil"], "unknown flag --no-compil; did you mean --no-compile?"),
        (["--zzz"], "unknown flag --zzz. See"),
        (["train"], "unexpected argument 'train'; settings are flags"),
        (["mnist.py"], "unexpected argument 'mnist.py'; for a script: `tandem launch mnist.py`; "),
        (["--nproc-per-node", "2"], "unknown flag --nproc-per-node; did you mean --nproc?"),
        (["--nproc_per_node=2"], "unknown flag --nproc_per_node; did you mean --nproc?"),
        (["--master_addr", "a"], "unknown flag --master_addr; did you mean --master HOST:PORT?"),
        (["--local-rank=0"], "unknown flag --local-rank; did you mean LOCAL_RANK=0 in the environment?"),
        (["--learning-rate", "0.1"], "unknown flag --learning-rate; did you mean --lr? See"),
        (["--max_grad_norm=1"], "unknown flag --max_grad_norm; did you mean --clip-norm? See"),
        (["--fp16"], "unknown flag --fp16; did you mean --precision fp16? See"),
        (
            ["--gradient-accumulation-steps", "4"],
            "unknown flag --gradient-accumulation-steps; did you mean --micro-batch-size, samples per rank",
        ),
        (["--lr"], "--lr: missing value; expected a number >= 0"),
        (["--lr", "--seed", "1"], "--lr: missing value"),
        (["--no-compile=1"], "--no-compile: unexpected value '1'"),
        (["--task.depth"], "--task.depth: missing value"),
    ],
)
def test_flags_that_cannot_be(argv: list[str], expected: str) -> None:
    assert message_of(*argv).startswith(expected)


@pytest.mark.parametrize("brought", BROUGHT_ALONG)
def test_a_flag_of_another_trainer_is_answered_with_ours(brought: str) -> None:
    meant = BROUGHT_ALONG[brought]
    assert message_of(f"--{brought}", "1") == (
        f"unknown flag --{brought}; did you mean {meant}? See `tandem config --explain`"
    )
    named = re.findall(r"--[a-z-]+", meant)
    assert set(named) <= set(FLAGS) and (named or meant.endswith(" in the environment"))
    if example := re.fullmatch(r"(--[a-z-]+) ([a-z0-9%]+)", meant):  # with a value that it takes
        settings_of(*example.groups())


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("0.5", 0.5), ("90s", 90), ("5m", 300), ("1.5min", 90), ("2h", 7200)]
)
def test_a_time_may_have_a_unit(text: str, seconds: float) -> None:
    found = settings_of("--hang-timeout", text, "--metrics-linger", text)
    assert (found.reliability.hang_timeout, found.metrics.metrics_linger) == (seconds, seconds)


@pytest.mark.parametrize(
    ("flag", "text", "valid"),
    [
        ("--epochs", "zero", "an integer >= 1"),
        ("--epochs", "0", "an integer >= 1"),
        ("--lr", "nan", "a number >= 0"),
        ("--momentum", "1", "a number >= 0 and < 1"),
        ("--schedule", "cosin", "one of constant, linear, cosine, step"),
        ("--strategy", "horovod", "one of single, dp, ddp, fsdp"),
        ("--compile", "maybe", "default, reduce-overhead, max-autotune, or none"),
        ("--download", "maybe", "true or false"),
        ("--gradient-compression", "powersgd:0", "one of none, bf16, fp16, or powersgd or powersgd:RANK"),
        ("--strategy", "dp:0", "one of single, dp, ddp, fsdp, or dp:SHARE"),
        ("--strategy", "dp:1.1", "one of single, dp, ddp, fsdp, or dp:SHARE"),
        ("--lr-scaling", "linear:0", "one of none, linear, sqrt, or linear:BATCH"),
        ("--threads", "0", "auto, or an integer >= 1"),
        ("--steps", "0", "an integer >= 1, or none"),
        ("--data-dir", "", "a path"),
        ("--master", "node-0", "HOST:PORT"),
        ("--master", "node-0:0", "HOST:PORT"),
        ("--master", "::1:23456", "HOST:PORT"),
        ("--elastic", "4:1", "MIN:MAX nodes"),
        ("--elastic", "0:1", "MIN:MAX nodes"),
        ("--profile", "10:0", "START:STEPS"),
        ("--log-every", "5x", "a cadence such as 200 (steps), 1epoch, 30s, 10m, 10% or never"),
        ("--hang-timeout", "5x", "auto, or seconds > 0, such as 90, 90s or 5m"),
        ("--phase-timeout", "0s", "seconds > 0"),
        ("--metrics-linger", "1 m", "seconds >= 0, such as 15, 15s or 1m"),
        ("--warmup", "30s", "steps, epochs or percent"),
        ("--metrics", "65536", "HOST:PORT or PORT"),
        ("--metrics", "::1:7", "HOST:PORT or PORT"),
        ("--tracker", "tensorboard,neptune", "one of tensorboard, mlflow, wandb, or tensorboard,mlflow"),
    ],
)
def test_bad_values_name_flag_value_and_what_is_valid(flag: str, text: str, valid: str) -> None:
    assert message_of(flag, text).startswith(f"{flag}: invalid value {text!r}; expected {valid}")
    variable = "TANDEM_" + flag.removeprefix("--").replace("-", "_").upper()
    if text:
        expected = f"{variable}: invalid value {text!r}; expected {valid}"
        assert message_of(environ={variable: text}).startswith(expected)


def test_good_values_of_checked_texts() -> None:
    for address in ("plain-master-0:23456", "10.0.0.1:1", "[::1]:65535"):
        assert settings_of("--master", address).launch.master == address
    assert settings_of("--elastic", "2:2", "--profile", "0:1", "--warmup", "5%").launch.elastic == "2:2"
    assert settings_of("--threads", "4", "--nproc", "auto").compute.threads == 4


def test_a_long_bad_value_is_cut() -> None:
    assert len(message_of("--epochs", "9" * 5000 + "x\n")) < 200


def test_unknown_variables(tmp_path: Path) -> None:
    assert message_of(environ={"TANDEM_EPOCH": "3"}).startswith(
        "unknown variable TANDEM_EPOCH; did you mean TANDEM_EPOCHS?"
    )
    assert message_of(environ={"TANDEM_lr": "3"}).startswith(
        "unknown variable TANDEM_lr; did you mean TANDEM_LR?"
    )
    assert message_of(environ={"TANDEM_QQQ": ""}).startswith("unknown variable TANDEM_QQQ. See")
    dotenv = tmp_path / ".env"
    dotenv.write_text("TANDEM_EPOCH=3\n")
    assert "TANDEM_EPOCH in .env; did you mean TANDEM_EPOCHS?" in message_of(dotenv=dotenv)
    dotenv.write_text("TANDEM_EPOCHS=x\n")
    assert message_of(dotenv=dotenv).startswith("TANDEM_EPOCHS in .env: invalid value 'x'")


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("epoch = 3", "unknown key epoch in {file}; did you mean epochs?"),
        ("epochs = true", "epochs in {file}: invalid value 'true'"),
        ("epochs = [1]", "epochs in {file}: invalid value [1]"),
        ("lr = inf", "lr in {file}: invalid value 'inf'"),
        ("task_fields = 3", "task_fields in {file}: invalid value 3; expected a table"),
        ("[task_fields]\ndepth = []", "task.depth in {file}: invalid value []"),
        ("epochs =", "--config: invalid value '{file}'; expected "),
    ],
)
def test_config_files_that_cannot_be(tmp_path: Path, toml: str, expected: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(toml)
    assert message_of("--config", str(file)).startswith(expected.format(file=file))


def write_config_json(path: Path, *argv: str, **more: object) -> None:
    path.write_text(json.dumps({**settings_of(*argv).to_dict(), **more}))


def test_a_run_begins_again_from_its_config_json(tmp_path: Path) -> None:
    file, dotenv = tmp_path / "config.json", tmp_path / ".env"
    chosen = ["--lr", "1e-5", "--steps", "7", "--compile", "--keep-best", "loss:min", "--task.depth", "4"]
    places = ["--run-dir", "/runs/a", "--node-rank", "0", "--master", "127.0.0.1:7"]
    write_config_json(file, *chosen, *places)
    dotenv.write_text("TANDEM_EPOCHS=9\n")
    loaded = load(["--config", str(file), "--seed", "3"], {}, dotenv)
    assert loaded.settings == settings_of(*chosen, "--seed", "3", "--epochs", "9")
    assert loaded.chosen == {"lr", "steps", "compile", "keep_best", "task.depth", "seed", "epochs"}
    assert loaded.sources["lr"] == f"config {file}" and loaded.sources["epochs"] == ".env"
    (note,) = loaded.notes
    assert note.startswith(f"{file}: ") and note.endswith(": run_dir, node_rank, master")
    again = load(["--config", str(file), *places], {}, None)
    assert again.settings == settings_of(*chosen, *places) and again.notes == ()


def test_a_config_json_of_another_version_is_read_with_one_line(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    write_config_json(file, "--lr", "0.3", not_yet_invented=[1], gone={})
    loaded = load(["--config", str(file)], {}, None)
    assert loaded.settings == settings_of("--lr", "0.3")
    (note,) = loaded.notes
    assert note.startswith(f"{file}: ") and note.endswith(": gone, not_yet_invented")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1]", "--config: invalid value '{file}'; expected "),
        ("{", "--config: invalid value '{file}'; expected "),
        ('{"epochs": null}', "epochs in {file}: invalid value 'none'"),
        ('{"epochs": [3]}', "epochs in {file}: invalid value [3]"),
        ('{"lr": NaN}', "lr in {file}: invalid value 'nan'"),
        ('{"task_fields": [3]}', "task_fields in {file}: invalid value [3]; expected a table"),
        ("[" * 100_000, "--config: invalid value '{file}'; expected "),
    ],
)
def test_config_json_that_cannot_be(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    assert message_of("--config", str(file)).startswith(expected.format(file=file))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in message_of(environ={"TANDEM_CONFIG": str(tmp_path / "gone.toml")})
    dotenv = tmp_path / ".env"
    dotenv.write_bytes(b"TANDEM_TASK=\xff\n")
    assert message_of(dotenv=dotenv).startswith(f"cannot read {dotenv}")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("TANDEM_EPOCHS: 3\n", 1),
        ('A=1\n\nTANDEM_TASK="digits\n', 3),
        ("export TANDEM_TASK='digits\n", 1),
        ('A=1\nB="open\nTANDEM_EPOCHS=3\nC="x"\n', 2),  # the quote of B swallows the setting
    ],
)
def test_a_line_of_the_dotenv_file_that_sets_nothing_is_an_error(
    tmp_path: Path, text: str, line: int
) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text(text)
    assert message_of(dotenv=dotenv).startswith(f"line {line} of {dotenv} is not a variable; expected")


def test_lines_of_other_programs_in_the_dotenv_file_are_theirs(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text("# TANDEM_LR: 3\nCOMMAND: echo $TANDEM_LR\nexport TANDEM_EPOCHS=7 # seven\n")
    assert load([], {}, dotenv).settings.run.epochs == 7


def test_the_mark_that_editors_on_windows_write_is_no_part_of_a_file(tmp_path: Path) -> None:
    for name, text in (
        ("a.toml", "epochs = 7\r\n"),
        ("a.yaml", "epochs: 7\r\n"),
        ("a.json", '{"epochs": 7}'),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert load(["--config", str(tmp_path / name)], {}, None).settings.run.epochs == 7
    (tmp_path / ".env").write_text("TANDEM_EPOCHS=7\r\n", encoding="utf-8-sig")
    assert load([], {}, tmp_path / ".env").settings.run.epochs == 7


def test_dict_round_trip_goes_through_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_EPOCHS", "99")
    settings = settings_of("--lr", "0.3", "--threads", "2", "--run-dir", "runs/a", "--task.depth", "4")
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    with pytest.raises(ConfigError, match="unknown setting epoch; did you mean epochs"):
        Settings.from_dict({"epoch": 1})
    with pytest.raises(ConfigError, match="^epochs: invalid value 0"):
        Settings.from_dict({"epochs": 0})


def test_fingerprint_fields() -> None:
    assert settings_of("--task.depth", "4").fingerprint_fields() == {
        "task": "digits",
        "task_fields": {"depth": "4"},
        "seed": 0,
        "batch_size": 240,
        "precision": "fp32",
        "optimizer": "sgd",
        "sync_batchnorm": False,
        "gradient_compression": "none",
    }


@given(
    st.lists(
        st.sampled_from([*FLAGS, "--no-compile", "--task.x", "x", "1", "=", "--", "--config", "none", ""])
    )
)
def test_any_command_line_gives_settings_or_one_line(argv: list[str]) -> None:
    try:
        load(argv, {}, None)
    except ConfigError as error:
        assert "\n" not in str(error)


def test_explain_and_table_have_every_setting() -> None:
    explained = explain(load(["--lr", "0.3", "--task.depth=4"], {}, None)).splitlines()
    assert [line.split()[0] for line in explained] == [*FIELDS, "task.depth"]
    assert any(line.split() == ["lr", "0.3", "flag", "--lr"] for line in explained)
    rows = [row for row in markdown().splitlines() if row.startswith("| `")]
    assert all(row.count("|") == 6 for row in rows)
    assert [row.split("`")[1] for row in rows] == [*(each.flag for each in SETTINGS.values()), "--config"]
    assert all(row.split("|")[5].strip() for row in rows)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--lr", "1e-5", "--steps", "7", "--compile", "--threads", "3", "--keep-best", "loss:min"],
        ["--run-dir", 'a "quoted" \\ path\x7f\N{GRINNING FACE}', "--task.depth", "4", "--task.name", "a\nb"],
    ],
)
def test_config_prints_a_file_that_config_reads(argv: list[str], tmp_path: Path) -> None:
    settings = settings_of(*argv)
    file = tmp_path / "run.toml"
    file.write_text(as_toml(settings), encoding="utf-8")
    assert settings_of("--config", str(file)) == settings


def test_a_file_of_another_version_may_name_unknown_settings() -> None:
    values = {"lr": 0.3, "not_yet_invented": [1]}
    assert Settings.from_dict(values, tolerant=True) == settings_of("--lr", "0.3")
    with pytest.raises(ConfigError, match="unknown setting not_yet_invented"):
        Settings.from_dict(values)


def test_settings_need_neither_torch_nor_pydantic_until_a_value_is_given() -> None:
    code = "import sys, tandem.config; sys.exit(bool({'torch', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_only_the_environment_can_say_is_no_silence_in_the_dotenv_file(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text(
        "TANDEM_STATE_DIR=/x\nTANDEM_TRIALS=3\nTANDEM_JOB_SECRET=0123456789abcdef\nTANDEM_LR=2\n"
    )
    notes = load([], {}, dotenv).notes
    assert [note.partition(" ")[0] for note in notes] == ["TANDEM_STATE_DIR", "TANDEM_TRIALS"]


def test_a_value_that_is_refused_shows_no_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_dict({"task_fields": [{"api_key": "correct-horse"}]})
    assert "task_fields" in str(caught.value) and "correct-horse" not in str(caught.value)
