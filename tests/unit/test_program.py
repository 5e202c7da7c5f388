"""Where tandem's own words end, what is refused before anything starts, and who is to blame at the end."""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import run
from tandem.config import Given, Settings, resolve
from tandem.distributed.position import Position, RankStart
from tandem.errors import ConfigError
from tandem.launch.program_arguments import check, hint, is_custom_loop, split, to_verify, without_effect
from tandem.script.execute import code_of
from tandem.script.job import Job, Program, variables
from tandem.script.observer import where
from tandem.work.base import Cause, choose_cause, failures, last_words
from tandem.work.program import variables_of

ENVIRONMENTS = Path(__file__).parents[1] / "fixtures" / "environments"


@pytest.mark.parametrize(
    "words, ours, program",
    [
        ("--nodes 2", "--nodes 2", None),
        ("train.py", "", Program("script", "train.py")),
        ("--nodes 2 a.py --nodes 3 -m", "--nodes 2", Program("script", "a.py", ("--nodes", "3", "-m"))),
        ("--nodes=2 train.py --help", "--nodes=2", Program("script", "train.py", ("--help",))),
        ("--fresh-interpreter train.py", "--fresh-interpreter", Program("script", "train.py")),
        ("--fresh-interpreter true train.py", "--fresh-interpreter true", Program("script", "train.py")),
        ("--no-cold train.py true", "--no-cold", Program("script", "train.py", ("true",))),
        ("--config a.toml -m pack.age -x", "--config a.toml", Program("module", "pack.age", ("-x",))),
        ("--nproc 2 -- bash -c x", "--nproc 2", Program("command", "bash", ("-c", "x"))),
        ("--help train.py", "--help", Program("script", "train.py")),
    ],
)  # fmt: skip
def test_the_program_begins_where_no_setting_is(words: str, ours: str, program: Program | None) -> None:
    assert split(words.split()) == (ours.split(), program)
    if program is not None:
        assert split(program.words()) == ([], program)


@pytest.mark.parametrize("mark", ["-m", "--"])
def test_a_mark_with_nothing_after_it_is_refused(mark: str) -> None:
    with pytest.raises(ConfigError, match="needs a"):
        split(["--nodes", "2", mark])


def test_what_cannot_start_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("x = 1\nif:\n")
    Path("binary.py").write_bytes(b"\x7fELF\0\0")
    Path("folder").mkdir()
    for name in ("main", "package"):
        Path(name).mkdir()
        Path(name, "train.py").touch()
    Path("package", "__init__.py").touch()
    Path("run.sh").write_text("#!/bin/sh\necho done\n")
    Path("run.sh").chmod(0o755)
    Path("data.sh").touch(mode=0o644)
    cases = {
        "no script train.py found": Program("script", "train.py"),
        "for the built-in task use --task digits": Program("script", "digits"),
        "folder is a directory": Program("script", "folder"),
        "use -m folder": Program("script", "folder/"),
        "broken.py, line 2 is not Python": Program("script", "broken.py"),
        "binary.py is not Python": Program("script", "binary.py"),
        "no module 'nowhere'": Program("module", "nowhere.train"),
        "no-such-command: command not found": Program("command", "no-such-command"),
        "no script trian.py found": Program("script", "trian.py"),
        "did you mean main/train.py?": Program("script", "main/trian.py"),
        "tandem launch -- sh": Program("script", "sh", ("run.sh",)),
        "run.sh, line 2 is not Python: invalid syntax; to run another kind of program use -- ./run.sh": (
            Program("script", "run.sh")
        ),
        "-- run.sh: not on PATH; for the file here use -- ./run.sh": Program("command", "run.sh"),
        "-- ./data.sh: not executable; type: chmod +x data.sh": Program("command", "./data.sh"),
        "for a script omit -m": Program("module", "main/train.py"),
        "no module 'packge' found here; did you mean package?": Program("module", "packge.train"),
    }
    for text, program in cases.items():
        with pytest.raises(ConfigError) as caught:
            check(program, {})
        assert text in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="directory") as caught:
        check(Program("script", "."), {})
    assert "-m" not in str(caught.value)
    check(Program("command", sys.executable), {})
    check(Program("module", "json.tool"), {})
    check(Program("command", "./run.sh"), {})
    Path("run").write_text("#!/usr/bin/env python3\nprint('done')\n")
    check(Program("script", "run"), {})  # Python, whatever its name
    with pytest.raises(ConfigError, match="--task names a task"):
        check(Program("module", "json"), {"task": Given("digits", "flag --task", "--task")})


def test_a_program_gets_the_settings_that_were_given_as_variables() -> None:
    settings = Settings().replace(run_dir=Path("/runs/x"), epochs=3, download=True, nodes=2, task="train")
    given = {"run_dir", "epochs", "download", "nodes", "task", "seed", "metrics"}
    assert variables_of(settings, given) == {
        "TANDEM_RUN_DIR": "/runs/x", "TANDEM_RESUME": "auto", "TANDEM_EPOCHS": "3", "TANDEM_DOWNLOAD": "true",
        "TANDEM_SEED": "0",  # given, be it as the default: it goes before what the script says
    }  # fmt: skip


def test_a_flag_with_the_default_goes_before_dotenv_in_the_script_too(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("TANDEM_SEED=5\nTANDEM_LR=0.7\n")
    flags = {"seed": Given("0", "flag --seed", "--seed")}
    given = resolve(flags, {}, tmp_path / ".env")
    variables = variables_of(given.settings.replace(run_dir=tmp_path), given.chosen)
    inside = resolve({}, variables, tmp_path / ".env").settings
    assert (inside.run.seed, inside.optimization.lr) == (0, 0.7)


@pytest.mark.parametrize("name", ["slurm-two-per-node-1", "torchrun-rank-1"])
def test_where_each_process_is_a_rank_already_a_program_is_not_launched_again(
    name: str, tmp_path: Path, processes: Any
) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    lines = (ENVIRONMENTS / f"{name}.env").read_text().splitlines()
    place = dict(line.split("=", 1) for line in lines if "=" in line)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TANDEM_")}
    command = [sys.executable, "-m", "tandem", "launch", "--run-dir", "run", "train.py"]
    code, output = processes.run(command, 60, cwd=tmp_path, env=clean | place)
    assert code == 2 and output.count("\n") == 1
    assert "already starts each rank; `tandem launch train.py` would start them again" in output
    assert not (tmp_path / "run").exists()


def test_threads_are_torchruns_where_ranks_share_a_host() -> None:
    job = Job(Program("script", "x.py"), "/run/log", {}, 5, None, 60.0, False, False)
    two = RankStart(Position(ranks_on_host=2))
    assert "OMP_NUM_THREADS" not in variables(job, RankStart(), {})
    assert variables(job, two, {})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in variables(job, two, {"OMP_NUM_THREADS": "3"})


@pytest.mark.parametrize(
    "first, later, expected",
    [
        ({0: 200}, {0: 200, 1: 1}, (1, 1)),  # rank 0 lost rank 1, which had a bug
        ({0: 200}, {0: 200, 1: 137}, (1, 137)),
        ({0: 1, 1: 137}, {}, (1, 137)),  # seen at once: the one that was killed explains the other
        ({1: 1}, {1: 1, 0: 134}, (1, 1)),  # the first failure counts, not what comes of it
        ({0: 200}, {0: 200, 1: 200}, (0, 200)),
        ({0: 2, 1: 200}, {}, (0, 2)),
    ],
)
def test_who_is_to_blame(first: dict[int, int], later: dict[int, int], expected: tuple[int, int]) -> None:
    assert choose_cause(first, later) == expected


def test_ranks_that_ended_well_or_as_asked_have_not_failed() -> None:
    assert failures({0: 0, 1: 143, 2: None, 3: 1, 4: 200}) == {3: 1, 4: 200}


def test_a_cause_names_rank_node_and_last_words(tmp_path: Path) -> None:
    log, error = tmp_path / "rank-1.log", tmp_path / "error.json"
    log.write_text("step 1\n\nTraceback\nKeyError: 'x'\n")
    assert last_words(error, log)[-1] == "KeyError: 'x'"
    error.write_text(json.dumps({"message": {"extraInfo": {"py_callstack": "a\nValueError: my bug\n"}}}))
    cause = Cause(1, 1, "node-1", 1, last_words(error, log))
    assert cause.with_traceback() == "rank 1 on node 1 (node-1) ended with 1:\n  a\n  ValueError: my bug"
    assert Cause.from_json(cause.to_json()) == cause
    assert str(Cause(1, 1, "node-1", 137)) == "rank 1 on node 1 (node-1) was killed (SIGKILL)"


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff", b"5", b"{}", b"[]", b"[" * 100_000, '{"lines": 3}', '{"lines": [1]}',
     '{"rank": "a", "node": 0, "node_name": "b", "code": 1, "lines": []}',
     '{"rank": 0, "node": 0, "node_name": "b", "code": 1.5, "lines": []}'],
)  # fmt: skip
def test_what_is_no_cause_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Cause.from_json(text)


def test_a_cause_is_shown_without_what_a_terminal_would_obey() -> None:
    there = Cause(0, 1, "b\x1b[2J", 1, ("a\x1b]0;x\x07", "b" * 5000))
    assert not set("\x1b\x07") & set(found := Cause.from_json(there.to_json()).with_traceback()), found
    assert len(found) < 1200


@pytest.mark.parametrize("given, code", [(None, 0), (3, 3), ("sorry", 1), (True, 1), (256, 0)])
def test_exit_codes_are_pythons(given: object, code: int) -> None:
    assert code_of(SystemExit(given)) == code


def test_a_place_is_the_programs_own_line() -> None:
    place, in_distributed, in_autograd = where(sys._getframe())
    assert place.startswith("test_program.py:") and not in_distributed and not in_autograd


def test_a_place_is_a_line_of_a_file() -> None:
    """A dataclass's methods and other code made as it ran have no file to look into."""
    made: dict[str, Any] = {"where": where, "sys": sys}
    exec("def asked(): return where(sys._getframe())", made)
    assert made["asked"]()[0].startswith("test_program.py:")


TASK_FILE = """
from torch import nn

class Mine:
    def build_model(self): return nn.Linear(1, 1)
    def build_datasets(self): return None
    def loss(self, model, batch): return model(batch).sum()
"""


def test_a_task_can_be_given_in_place_of_a_script() -> None:
    words = ["--nodes", "2", "mine.py:Mine", "--epochs", "3", "--task.width", "4"]
    task = ["--nodes", "2", "--task", "mine.py:Mine", "--epochs", "3", "--task.width", "4"]
    assert split(words) == (task, None)
    for words in (["--task=mine.py:Mine", "--epochs", "3"], ["--nodes", "2", "--task", "mine.py:Mine"]):
        assert split(words) == (words, None)


@pytest.mark.parametrize(
    ("more", "is_refused"),
    [
        ("", True),
        ("import os\nWIDTH = 3", True),
        ("main()", False),
        ("if __name__ == '__main__': main()", False),
        (TASK_FILE.replace("Mine", "Other"), False),
    ],
)
def test_a_file_that_only_defines_a_task_is_refused(tmp_path: Path, more: str, is_refused: bool) -> None:
    path = tmp_path / "mine.py"
    path.write_text(TASK_FILE + more)
    with pytest.raises(ConfigError) if is_refused else nullcontext() as caught:
        check(Program("script", str(path), ()), {})
    assert not is_refused or "mine.py:Mine" in str(caught)


def test_verify_resume_runs_a_script_with_its_own_words(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import tandem\nrun = tandem.start()\n")
    ours, program = split(["--json", "--nproc", "2", str(script), "--lr", "0.1"])
    assert ours == ["--json", "--nproc", "2"]
    assert to_verify(None, program, {}) == Program("script", str(script), ("--lr", "0.1"))
    ours, program = split(["--script", str(script), "--", "100"])
    assert to_verify(str(script), program, {}) == Program("script", str(script), ("100",))
    assert to_verify(None, None, {}) is None
    assert is_custom_loop(script)


@pytest.mark.parametrize(
    "script, program, said",
    [
        (None, Program("command", "no-such-command"), "command not found"),
        (None, Program("script", "100"), "no script 100 found"),
        (None, Program("script", "sh"), "no script sh found"),
        (__file__, Program("script", "100"), "unexpected argument '100' after --script"),
    ],
)
def test_what_verify_resume_cannot_run_names_verify_resume(
    script: str | None, program: Program, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        to_verify(script, program, {})
    assert "tandem launch" not in str(caught.value) and "--task 100" not in str(caught.value)


def test_the_closing_line_names_the_error_where_there_is_one() -> None:
    cause = Cause(0, 0, "127.0.0.1", 1, ("Traceback (most recent call last):", "ValueError: my bug"))
    assert cause.in_one_line() == "rank 0 on node 0 (127.0.0.1) ended with 1: ValueError: my bug"
    assert Cause(0, 0, "127.0.0.1", 3, ("some output",)).in_one_line().endswith("ended with 3")
    full = ("tandem.errors.CheckpointError: cannot write checkpoint step 4: No space left on device",)
    assert Cause(0, 0, "h", 1, full).in_one_line().endswith(" 1: " + full[0].partition(": ")[2])
    assert Cause(0, 0, "h", 137, full).in_one_line().endswith(" 137: " + full[0].partition(": ")[2])


@pytest.mark.parametrize(
    ("arguments", "said", "typed"),
    [
        (("--nodes", "2"), "train.py: error: unrecognized arguments: --nodes 2", "--nodes 2"),
        (("--lr=1", "data"), "train.py: error: unrecognized arguments: --lr=1", "--lr=1"),
        (("--nproc_per_node", "4"), "Error: No such option: --nproc_per_node", "--nproc_per_node 4"),
        (("--nodes", "2", "--size", "3"), "train.py: error: unrecognized arguments: --size 3", ""),
        (("--epochs", "x"), "train.py: error: argument --epochs: invalid int value: 'x'", ""),
        (("--size", "3"), "train.py: error: unrecognized arguments: --size 3", ""),
    ],
)
def test_a_flag_of_tandem_that_the_script_rejects_has_a_hint(
    arguments: tuple[str, ...], said: str, typed: str
) -> None:
    found = hint(Program("script", "train.py", arguments), said)
    assert found.endswith(f": tandem launch {typed} train.py") if typed else found == ""
    assert hint(Program("command", "train.py", arguments), said) == ""
    if typed:
        assert f"tandem launch {typed} -m train" in hint(Program("module", "train", arguments), said)


def test_a_command_that_is_missing_names_the_verb() -> None:
    for verb in ("verify-resume", "launch"):
        with pytest.raises(ConfigError, match=f"See `tandem {verb} --help`"):
            run(verb, ["--"], {})


def test_settings_that_a_plain_script_does_not_read_are_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    flags = {name: Given(text, f"flag --{name}", f"--{name}") for name, text in
             (("epochs", "3"), ("nodes", "2"), ("lr", "0.5"))}  # fmt: skip
    program = Program("script", str(script))
    warned = without_effect(program, flags)
    assert "--epochs 3 --lr 0.5" in warned and "--nodes" not in warned and "\n" not in warned
    assert without_effect(program, {"nodes": flags["nodes"]}) == ""
    assert without_effect(Program("module", "train"), flags) == ""
    (tmp_path / "helper.py").write_text("from tandem import start\n")
    assert without_effect(program, flags) == "", "a file next to the script may read them"
