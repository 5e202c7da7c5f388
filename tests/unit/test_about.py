"""What page and report say of a run beside its numbers, and what they do not: secrets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from patience import patient
from tandem.config import Settings
from tandem.config.address import HIDDEN, hidden, hide, is_secret, secrets_in
from tandem.report import about as about_module
from tandem.report.about import LINE_CHARACTERS, LOG_LINES, About


def test_a_launch_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["/usr/bin/tandem", "launch", "--lr", "0.5", "--task.api-key", "geheim1"]
    )
    monkeypatch.chdir(tmp_path)
    About(tmp_path).write(["NVIDIA H200", "NVIDIA H200"])
    said = About(tmp_path).read()
    assert said["command"] == f"tandem launch --lr 0.5 --task.api-key {HIDDEN}"
    assert said["folder"] == str(tmp_path) and said["commit"] is None and said["started"] > 1e9
    assert said["versions"]["torch"] and said["versions"]["tandem"]
    assert "2 x NVIDIA H200" in said["hardware"]


def test_the_commit_is_that_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    for words in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "a"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, env=environment, check=True)
    whole = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True).stdout
    commit = about_module._commit(tmp_path)
    assert commit is not None and len(commit) >= 12 and whole.startswith(commit)


def test_of_a_simulated_node_it_is_what_was_typed(tmp_path: Path) -> None:
    """Node 0 is told its place by flags of its own; its parent has the words that a person gave."""
    words = ["/x/tandem/__main__.py", "launch", "--lr", "1", "--node-rank", "0"]
    code = f"import sys; sys.argv[:] = {words}; "
    code += "from tandem.report.about import _command; print(_command())"
    parent = tmp_path / "tandem"
    parent.write_text(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])")
    command = [sys.executable, str(parent), "launch", "--lr", "1", "--nodes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(100))
    assert done.stdout == "tandem launch --lr 1 --nodes 2\n", done.stderr


def test_of_a_launched_function_it_is_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody typed the command line that `tandem.launch` makes, nor the file in it."""
    words = ["-c", "launch", "--nodes=2", "-m", "tandem.script.function", "/tmp/x/train_it.pickle"]
    monkeypatch.setattr(sys, "argv", words)
    assert about_module._command() == "tandem.launch(train_it)"


def test_a_full_disk_is_no_error(tmp_path: Path) -> None:
    About(tmp_path / "none").write([])


def test_settings_say_whether_they_differ(tmp_path: Path) -> None:
    usual = Settings().to_dict()
    told = {**usual, "lr": 0.5, "data_dir": "/here/data", "task_fields": {"depth": "3", "hf_token": "hf_abc"}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    (tmp_path / "about.json").write_text('{"folder": "/here"}')
    rows = {row["name"]: row for row in About(tmp_path).read()["settings"]}
    assert [name for name, row in rows.items() if row["differs"]] == ["task.depth", "task.hf_token", "lr"]
    assert (rows["lr"]["value"], rows["lr"]["default"]) == (0.5, 0.1)
    assert rows["task.depth"]["value"] == "3" and rows["task.hf_token"]["value"] == HIDDEN
    assert len(rows) == len(usual) + 1
    (tmp_path / "about.json").write_text("[]")
    assert {row["name"]: row for row in About(tmp_path).read()["settings"]}["data_dir"]["differs"]
    (tmp_path / "config.json").write_text('{"task_fields": [1], "of another version": {"a": 1}}')
    assert len(About(tmp_path).read()["settings"]) == 2


def test_the_log_is_that_of_the_rank_that_failed(tmp_path: Path) -> None:
    assert About(tmp_path).log() == {"file": None, "lines": []}
    (tmp_path / "log").mkdir()
    for rank in (0, 3):
        (tmp_path / "log" / f"rank-{rank}.log").write_text(f"of rank {rank}\n")
    assert About(tmp_path).log()["lines"] == ["of rank 0"]
    assert About(tmp_path).log("ended with code 1: rank 3 on node 1: KeyError: 4")["file"] == "log/rank-3.log"
    assert About(tmp_path).log("rank 7 on node 1: gone")["file"] == "log/rank-0.log"  # another node's disk


def test_the_log_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    log = tmp_path / "log" / "rank-0.log"
    log.write_bytes(b"first\n" * 100_000 + b"\xff" * 50_000 + b"\nlast\n")
    lines = About(tmp_path).log()["lines"]
    assert isinstance(lines, list) and len(lines) <= LOG_LINES and lines[-1] == "last"
    assert max(map(len, lines)) == LINE_CHARACTERS
    for text in (
        "a." * 32_000,
        "token" * 13_000,
        "token " + " " * 64_000,
        "sk-eyJaaaaaaaaa" * 4_000,
        "a://" * 16_000,
    ):
        log.write_text(text)  # a test's limit ends what takes ages
        About(tmp_path).log()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("--task.api-key abc --lr 0.1", f"--task.api-key {HIDDEN} --lr 0.1"),
        ("AWS_SECRET_ACCESS_KEY=a/b+c x", f"AWS_SECRET_ACCESS_KEY={HIDDEN} x"),
        ("password: 'a b c' rest", f"password: {HIDDEN} rest"),
        ('{"db_password": "x y"}', f'{{"db_password": {HIDDEN}}}'),
        ("s3://key:word@host/bucket", f"s3://{HIDDEN}@host/bucket"),
        ("Authorization: Bearer abcdefgh.ijk", f"Authorization: Bearer {HIDDEN}"),
        ("got hf_abcdefghijklmnopqrstuv back", f"got {HIDDEN} back"),
        ("AKIAABCDEFGHIJKLMNOP", HIDDEN),
        ("it is correct-horse here", f"it is {HIDDEN} here"),
        ("max_tokens=512, 99 tokens/s", "max_tokens=512, 99 tokens/s"),
        ("--metrics-token-file /run/token", "--metrics-token-file /run/token"),
        ("step 5 of 60: loss 1.5615, 7,964 samples/s", "step 5 of 60: loss 1.5615, 7,964 samples/s"),
    ],
)
def test_secrets_are_not_shown(text: str, shown: str) -> None:
    assert hide(text, ["correct-horse", "", "of"]) == shown


def test_what_sounds_like_a_secret() -> None:
    assert is_secret("HF_TOKEN") and is_secret("task.api-key") and is_secret("PGPASSWORD")
    assert is_secret("AZURE_STORAGE_KEY") and is_secret("TANDEM_TASK__SIGNING_KEY")
    assert not any(map(is_secret, ("sort_key", "metrics_token_file", "lr", "tokenizer")))
    environ = {"HF_TOKEN": "a", "HOME": "/root", "AWS_SECRET_ACCESS_KEY": "b"}
    assert secrets_in(environ) == ["a", "b"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"auth": {"password": "horse", "user": "me"}}, {"auth": {"password": HIDDEN, "user": HIDDEN}}),
        ({"login": {"api_key": ["a", {"b": "c"}]}}, {"login": {"api_key": [HIDDEN, {"b": HIDDEN}]}}),
        ({"pin": {"db_password": 1234, "on": True}}, {"pin": {"db_password": HIDDEN, "on": True}}),
        ([{"name": "HF_TOKEN", "value": "abc"}], [{"name": "HF_TOKEN", "value": HIDDEN}]),
        (["--password", "horse", "--lr", "1"], ["--password", HIDDEN, "--lr", "1"]),
        ({"url": ["s3://key:word@host/b"]}, {"url": [f"s3://{HIDDEN}@host/b"]}),
        ({"hf_abcdefghijklmnopqrstuv": 1}, {HIDDEN: 1}),
        ({"depth": 3, "tokenizer": "bpe", "none": None}, {"depth": 3, "tokenizer": "bpe", "none": None}),
    ],
)
def test_secrets_are_not_shown_however_deep(tmp_path: Path, value: object, shown: object) -> None:
    assert hidden(value, is_setting=True) == shown
    (tmp_path / "config.json").write_text(json.dumps({"task_fields": {"field": value}, "other": value}))
    rows = {row["name"]: row["value"] for row in About(tmp_path).read()["settings"]}
    assert rows == {"task.field": shown, "other": shown}


def test_a_metric_that_is_called_like_a_secret_is_a_number() -> None:
    assert hidden({"loss_per_token": 0.5}) == {"loss_per_token": 0.5}


def test_a_log_that_a_link_leads_to_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "rank-0.log").write_text("canary\n")
    for name in ("file", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "file" / "log").mkdir()
    (tmp_path / "file" / "log" / "rank-0.log").symlink_to(tmp_path / "outside" / "rank-0.log")
    (tmp_path / "folder" / "log").symlink_to(tmp_path / "outside")
    for name in ("file", "folder"):
        assert About(tmp_path / name).log() == {"file": None, "lines": []}
