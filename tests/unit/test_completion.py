"""Completion in the shells themselves, and `tandem help TOPIC`."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from patience import patient
from tandem import cli
from tandem.config import SETTINGS, SLICES
from tandem.config.completion import flags_of, script, words_in
from tandem.errors import ConfigError

BASH = """
source "$0"
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_tandem
printf '%s\\n' "${COMPREPLY[@]}"
"""


def written(shell: str) -> str:
    parsers = {verb: cli.parser_of(verb) for verb in cli.VERBS}
    return script(shell, parsers, {verb: each.summary for verb, each in cli.VERBS.items()})


@pytest.fixture(scope="module")
def in_bash(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., set[str]]:
    path = tmp_path_factory.mktemp("completion") / "tandem"
    path.write_text(written("bash"))

    def complete(*words: str) -> set[str]:
        command = ["bash", "-c", BASH, str(path), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60))
        assert done.returncode == 0 and done.stderr == "", done.stderr
        return set(done.stdout.split())

    return complete


def test_bash_completes_verbs_flags_and_words(in_bash: Callable[..., set[str]]) -> None:
    assert in_bash("tandem", "") == set(cli.VERBS)
    assert in_bash("tandem", "ch") == {"check", "checkpoints"}
    assert in_bash("tandem", "launch", "--strat") == {"--strategy"}
    assert in_bash("tandem", "launch", "--strategy", "") == {"single", "dp", "ddp", "fsdp"}
    assert in_bash("tandem", "train", "--optimizer", "=", "ad") == {"adam", "adamw"}
    assert in_bash("tandem", "train", "--optimizer", "=") == {"sgd", "adam", "adamw"}
    assert in_bash("tandem", "checkpoints", "") == {"ls", "verify", "prune"}
    assert in_bash("tandem", "export", "run", "--format", "") == {"safetensors", "torch", "dcp", "onnx", "hf"}
    assert in_bash("tandem", "completion", "z") == {"zsh"}
    assert {"--no-compile", "--help", "--config"} <= in_bash("tandem", "launch", "digits", "--")


def test_where_no_word_is_known_bash_offers_files(in_bash: Callable[..., set[str]]) -> None:
    assert in_bash("tandem", "launch", "--run-dir", "") == set()
    assert "complete -o default -F _tandem tandem" in written("bash")


def test_every_flag_of_every_verb_is_completed(in_bash: Callable[..., set[str]]) -> None:
    for verb in cli.VERBS:
        assert in_bash("tandem", verb, "-") == {flag.name for flag in flags_of(cli.parser_of(verb))}


def test_words_are_those_of_the_settings() -> None:
    assert words_in(SETTINGS["strategy"].annotation) == ("single", "dp", "ddp", "fsdp")
    assert words_in(SETTINGS["threads"].annotation) == ("auto",)
    assert words_in(SETTINGS["epochs"].annotation) == ()


def in_shell(shell: str, path: Path, commands: str, folder: Path) -> list[str]:
    options = {"zsh": "-f", "fish": "--no-config"}[shell]
    command = [shell, options, "-c", f"source {path}; {commands}"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TERM": "dumb"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=patient(60), check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")


def test_fish_completes_with_what_a_flag_means(tmp_path: Path, require: Callable[..., None]) -> None:
    require("fish")
    path = tmp_path / "tandem.fish"
    path.write_text(written("fish"))
    asked = 'complete -C "tandem che"; complete -C "tandem train --optimizer a"'
    found = in_shell("fish", path, asked, tmp_path)
    assert [each.partition("\t")[0] for each in found if each] == ["check", "checkpoints", "adam", "adamw"]
    assert f"check\t{cli.VERBS['check'].summary}" in found


def test_zsh_takes_the_script(tmp_path: Path, require: Callable[..., None]) -> None:
    require("zsh")
    path = tmp_path / "tandem.zsh"
    path.write_text(written("zsh"))
    assert "_bash_complete" in "".join(in_shell("zsh", path, "print $_comps[tandem]", tmp_path))


def test_the_scripts_name_all_verbs_and_say_where_they_go() -> None:
    for shell in ("bash", "zsh", "fish"):
        text = written(shell)
        assert f"tandem completion {shell} > " in text.splitlines()[0]
        assert all(verb in text for verb in cli.VERBS)
    assert shutil.which("bash")


@pytest.mark.parametrize("topic", ["launch", "settings", "exit-codes", "143", *SLICES])
def test_help_has_topics(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("help", [topic], {}) == 0
    assert len(capsys.readouterr().out) > 60


@pytest.mark.parametrize("topic", ["hang-timeout", "--hang-timeout", "TANDEM_HANG_TIMEOUT", "hang_timeout"])
def test_help_on_a_setting(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.run("help", [topic], {})
    setting = SETTINGS["hang_timeout"]
    said = capsys.readouterr().out
    assert said.startswith(f"--hang-timeout: {setting.description}\n")
    assert "TANDEM_HANG_TIMEOUT in the environment" in said and setting.valid in said


def test_help_on_nothing_known_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no help on 'epoch'.* did you mean `tandem help epochs`"):
        cli.run("help", ["epoch"], {})
