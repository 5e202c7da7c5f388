"""The verbs: what they import, and what they say to a user who mistypes."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import tandem
from patience import patient
from tandem import cli
from tandem.checkpoint.store import CheckpointStore
from tandem.config import SETTINGS, SLICES, resolve
from tandem.config.arguments import read_by
from tandem.errors import ConfigError
from tandem.launch.program_arguments import split

SOURCE = str(Path(tandem.__file__).parents[1])
WATCHED = """
import sys
sys.path.insert(0, {source!r})
sys.argv = {argv!r}
from tandem.cli import main
try:
    main()
finally:
    heavy = {{"torch", "numpy", "pydantic"}} & set(sys.modules)
    print("IMPORTED", sorted(heavy), file=sys.stderr)
"""


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    return {**kept, **variables}


def watched(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, that says on stderr which heavy packages it imported."""
    script = WATCHED.format(source=SOURCE, argv=["tandem", *arguments])
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, cwd=folder, env=environment(**variables), capture_output=True, text=True, timeout=patient(60)
    )


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_help_needs_no_torch(arguments: list[str], tmp_path: Path) -> None:
    done = watched(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "IMPORTED []\n"
    assert all(f"tandem {verb}" in done.stdout for verb in cli.VERBS)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_lists_what_it_takes(verb: str, tmp_path: Path) -> None:
    done = watched(tmp_path, verb, "--help")
    assert (done.returncode, done.stderr) == (0, "IMPORTED []\n")
    assert done.stdout.startswith(f"usage: tandem {verb}")
    assert "\nexamples:\n" in done.stdout
    if cli.VERBS[verb].takes_settings:
        said = "".join(done.stdout.split())  # lines break at hyphens as well
        for setting in map(SETTINGS.__getitem__, read_by(verb)):
            for part in (setting.flag, f"; {setting.variable}]", setting.description, setting.valid):
                assert part.replace(" ", "") in said
        groups = {SLICES[SETTINGS[name].slice].__doc__ for name in read_by(verb)}
        shown = {str(each.__doc__) for each in SLICES.values() if f"\n{each.__doc__}:\n" in done.stdout}
        assert shown == groups and ("--sync-batchnorm" in done.stdout) == ("sync_batchnorm" in read_by(verb))


@pytest.mark.parametrize("verb", cli.VERBS)
def test_examples_in_the_help_are_command_lines_that_hold(verb: str) -> None:
    examples = cli.parser_of(verb).format_help().rpartition("\nexamples:\n")[2].splitlines()
    assert 2 <= len(examples) <= 3
    for line in examples:
        assert len(line) <= 120 and "  # " in line, line
        words = shlex.split(line, comments=True)
        words = words[words.index("tandem") + 1 :]
        named, words = words[0], [word for word in words[1:] if word != ">"]
        if ">" in line:  # where the shell writes what it prints
            words.pop()
        assert named == verb or (verb == "health" and named == "launch"), line
        program = None
        if verb in ("launch", "verify-resume"):
            words, program = split(words)
        options = cli.parser_of(named).read(words)
        assert (program is not None) == ("train.py" in line and verb in ("launch", "verify-resume"))
        if cli.VERBS[named].takes_settings:
            resolve(options.given, {}, None)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["config", "--explian"], "unknown flag --explian; did you mean --explain?"),
        (["checkpoints", "prune", ".", "--dry"], "unknown flag --dry; did you mean --dry-run?"),
        (["report", ".", "--ouput", "x"], "unknown flag --ouput; did you mean --output?"),
        (["report"], "the following arguments are required: RUN_DIR. See `tandem report --help`"),
        (["eval"], "the following arguments are required: RUN. See `tandem eval --help`"),
        (["export", "run", "--format", "onxx"], "--format: invalid choice: 'onxx' (choose from "),
        (
            ["verify-resume", "--trials", "0"],
            "--trials: invalid value '0'; expected an integer >= 1. See `tandem verify-resume --help`",
        ),
        (
            ["verify-resume", "--trials"],
            "--trials: missing value; expected an integer >= 1. See `tandem verify-resume --help`",
        ),
        (["verify-resume", "--script", "nothing.py"], "no script nothing.py found"),
        (
            ["verify-resume", "--script", __file__, "--task", "digits"],
            f"--task names a task, but {__file__} is a program",
        ),
        (["doctor", "--epoch", "1"], "unknown flag --epoch; did you mean --epochs?"),
        (["health", "--fast"], "unknown flag --fast. See `tandem health --help`"),
    ],
)
def test_every_verb_suggests_the_nearest(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cli.run(arguments[0], arguments[1:], {})
    assert str(caught.value).startswith(said)


def test_a_run_without_an_action_is_answered_with_what_lists_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"did you mean `tandem checkpoints ls {tmp_path}`"):
        cli.run("checkpoints", [str(tmp_path)], {})


def test_trials_come_from_the_environment_too() -> None:
    with pytest.raises(ConfigError, match="^TANDEM_TRIALS: invalid value 'x'"):
        cli.run("verify-resume", [], {"TANDEM_TRIALS": "x"})


def test_version_needs_no_torch(tmp_path: Path) -> None:
    done = watched(tmp_path, "--version")
    assert (done.returncode, done.stdout) == (0, f"tandem {tandem.__version__}\n")
    assert done.stderr == "IMPORTED []\n"


def test_health_needs_no_torch_and_is_unhealthy_where_nothing_runs(tmp_path: Path) -> None:
    done = watched(tmp_path, "health", TANDEM_STATE_DIR=str(tmp_path / "state"))
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == "IMPORTED []"
    assert "Traceback" not in done.stderr


def test_who_reads_no_further_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "tandem", "launch", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # before it has written
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("words, code", [("--version", 0), ("runs nowhere", 2), ("launch --nodes two", 2)])
def test_a_closed_stream_leaves_the_exit_code_alone(words: str, code: int, closed: str) -> None:
    """It was 120, Python's own for a last flush that fails, or 1."""
    command = ["sh", "-c", f"{sys.executable} -m tandem {words} {closed}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(100))
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["config"], ["--help"], ["config", "--json"]])
def test_output_that_a_full_disk_lost_is_an_error_in_one_line(words: list[str], unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tandem", *words],
            env=environment(PYTHONPATH=SOURCE, PYTHONUNBUFFERED=unbuffered),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=patient(100),
        )
    line = "tandem: the output is incomplete: No space left on device; free space and repeat\n"
    assert (done.returncode, done.stderr) == (1, line)


def test_a_run_directory_with_a_name_that_no_file_can_have_is_one_line(tmp_path: Path) -> None:
    done = watched(tmp_path, "launch", "--run-dir", "x" * 300)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{'x' * 300}: File name too long; give another --run-dir" in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["launch", "runs", "config"])
def test_a_directory_that_was_deleted_is_one_line(verb: str, tmp_path: Path) -> None:
    (here := tmp_path / "here").mkdir()
    words = shlex.join([sys.executable, "-m", "tandem", verb])
    done = subprocess.run(
        ["bash", "-c", f"rmdir {shlex.quote(str(here))}; exec {words}"],
        cwd=here,
        env=environment(PYTHONPATH=SOURCE),
        capture_output=True,
        text=True,
        timeout=patient(100),
    )
    assert done.returncode == 2
    assert done.stderr == "tandem: the current directory was deleted; type `cd` and one that exists\n"


@pytest.mark.parametrize(
    "typed, meant",
    [("lanch", "launch"), ("trian", "train"), ("checkpoint", "checkpoints"), ("confg", "config")],
)
def test_an_unknown_verb_suggests_the_nearest(typed: str, meant: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"unknown verb '{typed}'.*did you mean `tandem {meant}`"):
        cli.run(typed, [], {})


def test_a_verb_like_none_points_to_the_help(tmp_path: Path) -> None:
    done = watched(tmp_path, "xyzzy")
    lines = done.stderr.splitlines()
    assert done.returncode == 2
    assert lines[0].startswith("tandem: unknown verb 'xyzzy'") and "tandem --help" in lines[0]
    assert lines[1:] == ["IMPORTED []"]


def test_a_batch_that_cannot_be_shared_out_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    done = watched(tmp_path, "launch", "--nodes", "7", "--device", "cpu", "--run-dir", "run")
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    said, heavy = done.stderr.splitlines()
    assert said == "tandem: --batch-size 240 does not divide evenly over 7 ranks; use 238 or 245"
    assert "torch" not in heavy


def test_a_launch_says_what_it_leaves_out_of_a_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"nodes": 7, "device": "cpu", "run_dir": "/runs/a", "newer": 1}')
    done = watched(tmp_path, "launch", "--config", "config.json", "--run-dir", "run")
    assert done.returncode == 2
    newer, problem, _ = done.stderr.splitlines()
    assert newer.endswith("config.json: ignoring settings unknown to this version: newer")
    assert problem == "tandem: --batch-size 240 does not divide evenly over 7 ranks; use 238 or 245"
    alone = watched(tmp_path, "config", "--config", "config.json")
    assert "\n[launch]  # Nodes and restarts\nnodes = 7\n" in alone.stdout
    assert '\n# run_dir = "none"\n' in alone.stdout
    assert "tandem: config.json: ignoring the other run's paths and addresses: run_dir" in alone.stderr


def test_checkpoints_of_a_missing_directory_exit_2(tmp_path: Path) -> None:
    done = watched(tmp_path, "checkpoints", "ls", "absent")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "tandem: absent is not a directory; give the run directory"
    assert "'torch'" not in done.stderr


@pytest.mark.parametrize(
    "arguments", [[], ["ls"], ["list", "."], ["ls", ".", "extra"], ["prune", ".", "--keep"]], ids=" ".join
)
def test_checkpoints_says_how_it_is_used(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="tandem checkpoints"):
        cli.run("checkpoints", arguments, {})


@pytest.mark.parametrize("keep", ["0", "-1", "many"])
def test_prune_keeps_at_least_one(keep: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--keep"):
        cli.run("checkpoints", ["prune", str(tmp_path), "--keep", keep], {})


def test_checkpoints_of_an_empty_directory_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run("checkpoints", ["ls", str(tmp_path)], {}) == 0
    assert f"no checkpoints in {tmp_path}" in capsys.readouterr().out


def test_checkpoints_are_listed_verified_and_pruned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (10, 20, 30, 40):
        store.save(step, b"state", {"eval": {"accuracy": 1 - step / 100}})
    prune = ["prune", str(tmp_path), "--keep", "1", "--keep-best", "accuracy", "--keep-every", "30"]
    assert cli.run("checkpoints", [*prune, "--dry-run"], {}) == 0
    assert "would remove step 20, " in capsys.readouterr().out and store.steps() == [40, 30, 20, 10]
    assert cli.run("checkpoints", prune, {}) == 0
    said = capsys.readouterr().out
    assert said.startswith("removed step 20, ") and "best accuracy:max" in said
    assert store.steps() == [40, 30, 10]
    (store.path(40) / "state.pt").write_bytes(b"stale")
    assert cli.run("checkpoints", ["ls", str(tmp_path)], {}) == 0
    assert cli.run("checkpoints", ["verify", str(tmp_path)], {}) == 1
    assert "DAMAGED" in capsys.readouterr().out


def test_config_explains_where_values_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run("config", ["--explain", "--epochs", "7"], {"TANDEM_LR": "0.5"}) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "flag --epochs" in rows["epochs"] and "environment TANDEM_LR" in rows["lr"]
    assert rows["seed"].endswith("default")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["eval", "run", "--metrics", "0"], "--metrics has no effect on `tandem eval`"),
        (["eval", "run", "--lr=0.1"], "--lr has no effect on `tandem eval`"),
        (["export", "run", "--no-compile"], "--no-compile has no effect on `tandem export`"),
        (["export", "run", "--epoch", "1"], "unknown flag --epoch"),
    ],
)
def test_a_setting_that_a_verb_does_not_read_is_one_line(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match="^[^\n]+$") as caught:
        cli.parser_of(words[0]).read(words[1:])
    assert str(caught.value).startswith(says)


def test_variables_and_files_belong_to_the_job_and_not_to_the_verb(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("metrics = 0\n")
    given = cli.parser_of("export").read(["run", "--config", str(config)]).given
    assert resolve(given, {"TANDEM_LR": "0.5"}, None).chosen == {"metrics", "lr"}


@pytest.mark.parametrize("verb", ["check", "verify-resume", "bench", "doctor"])
def test_verbs_that_begin_like_a_launch_take_its_command_line(verb: str) -> None:
    words = [word for each in SETTINGS.values() if not each.is_table for word in [f"{each.flag}=true"]]
    assert len(cli.parser_of(verb).read(words).given) == len(words)


@pytest.mark.parametrize(
    ("flag", "level"), [("-q", "warning"), ("--quiet", "warning"), ("-v", "debug"), ("--verbose", "debug")]
)
def test_verbosity_is_ours_before_the_script_and_its_own_after(flag: str, level: str) -> None:
    words, program = split([flag, "--nproc", "2", "train.py", "-v"])
    assert words == [flag, "--nproc", "2"] and program is not None and program.arguments == ("-v",)
    for verb in ("launch", "train"):
        assert cli.parser_of(verb).read([flag]).log_level == level


@pytest.mark.slow
def test_quiet_keeps_the_exit_code_and_the_log_and_leaves_the_terminal_alone(tmp_path: Path) -> None:
    train = ["train", "--device", "cpu", "--steps", "2", "--eval-every", "never", "--metrics", "0"]
    train += ["--metrics-linger", "0", "--run-dir"]
    quiet, loud = watched(tmp_path, *train, "quiet", "-q"), watched(tmp_path, *train, "loud", "-v")
    assert (quiet.returncode, loud.returncode) == (0, 0), quiet.stderr + loud.stderr
    assert quiet.stderr == "" and "debug: setting steps" in loud.stderr
    assert "step" in (tmp_path / "quiet" / "log" / "rank-0.log").read_text()
    bad = watched(tmp_path, "launch", "-q", "--nodes", "7", "--device", "cpu", "--run-dir", "run")
    assert bad.returncode == 2 and bad.stderr.startswith("tandem: --batch-size 240 ")
