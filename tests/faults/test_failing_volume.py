"""Volumes that fail at any call, are full, read-only, stale or slow: nothing is lost, and nothing crashes."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from failing_calls import failing, slow
from small_runs import Runs
from trial_rows import SOURCE

from program_files import program_text
from tandem.checkpoint.retention import Retention
from tandem.checkpoint.store import CheckpointStore
from tandem.errors import CheckpointError
from trials.store import SCENARIOS, judge, save, scratch, store_in

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

FAILURES = [
    (errno.EIO, "once"),
    (errno.EIO, "after"),
    (errno.ESTALE, "once"),
    (errno.ENOSPC, "forever"),
    (errno.EROFS, "forever"),
]
TYPICAL = [(errno.EIO, "once"), (errno.EIO, "after"), (errno.ENOSPC, "forever")]


@pytest.mark.parametrize(
    "number, mode",
    [pytest.param(*each, marks=() if each in TYPICAL else pytest.mark.soak) for each in FAILURES],
    ids=[f"{errno.errorcode[number]} {mode}" for number, mode in FAILURES],
)
@pytest.mark.parametrize(
    "name", ["first save", "save and prune", "save of the same step", "quarantine, then save"]
)
def test_an_error_at_any_call(name: str, number: int, mode: Any) -> None:
    scenario = SCENARIOS[name]
    with scratch() as place:
        template, root = place / "template", place / "root"
        template.mkdir()
        scenario.prepare(store_in(template))
        nth, hit = 0, True
        while hit:
            shutil.copytree(template, root)
            refused = False
            with failing(nth, number, mode) as failure:
                try:
                    scenario.act(store_in(root))
                except CheckpointError as error:
                    assert os.strerror(number) in str(error) and "\n" not in str(error), f"call {nth}"
                    refused = True
            hit = failure.hit
            found = judge(root, scenario)
            assert found in ("old", "new"), f"call {nth}: {found}"
            assert refused or found == "new", f"call {nth} was acknowledged, but {found} is there"
            assert not (refused and number == errno.ESTALE and mode == "once"), (
                f"call {nth} is not tried again"
            )
            scenario.act(store_in(root))  # the volume is well again
            assert judge(root, scenario) == "new"
            assert not list(store_in(root).directory.glob(".*")), "nothing is left over"
            shutil.rmtree(root)
            nth += 1
    assert nth > 25


# Runs in a mount namespace of its own, with `sys.argv[1]` a small tmpfs.
SMALL_VOLUME = program_text("failing_volume_small_volume")


# volume, checkpoint, line, command: the volume is a small tmpfs, full from that checkpoint to that line.
FULL_FOR_A_WHILE = program_text("failing_volume_full_for_a_while")


# volume, size, line, command: the volume is a tmpfs of this size; SIGTERM at the line, if there is one.
TOO_SMALL = """
import signal, subprocess, sys

volume, size, line = sys.argv[1:4]
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", volume], check=True)
if size == "4k":
    with open(f"{volume}/filler", "wb") as file:
        file.write(bytes(4096))
run = subprocess.Popen(sys.argv[4:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
for said in run.stdout:
    print(said, end="")
    if line and line in said:
        run.send_signal(signal.SIGTERM)
        line = ""
sys.exit(run.wait())
"""


@pytest.fixture
def namespace(tmp_path: Path, require: Any) -> list[str]:
    """The command before one that may mount: for root a mount namespace, else one of users as well."""
    require("unshare")
    options = ["--mount"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--mount"]
    probe = ["unshare", *options, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    able = subprocess.run(probe, capture_output=True, text=True)
    require("mount", able.returncode == 0, able.stderr.strip())
    return ["unshare", *options]


def test_a_full_and_a_read_only_volume(processes: Any, tmp_path: Path, namespace: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [*namespace, sys.executable, "-c", SMALL_VOLUME, str(tmp_path)]
    code, output = processes.run(command, env=environment)
    assert code == 0, output


@pytest.fixture
def full_for_a_while(runs: Runs, namespace: list[str]) -> Callable[..., str]:
    """The output of a command that ends well on a volume that is full from this checkpoint to this line."""

    def run(checkpoint: str, line: str, command: list[str]) -> str:
        (runs.folder / "volume").mkdir()
        full = (str(runs.folder / "volume"), checkpoint, line)
        environment = {**runs.environment, "PYTHONPATH": str(SOURCE)}
        whole = [*namespace, sys.executable, "-c", FULL_FOR_A_WHILE, *full, *command]
        code, output = runs.processes.run(whole, cwd=runs.folder, env=environment)
        assert code == 0, output
        return str(output)

    return run


@pytest.fixture
def too_small(runs: Runs, namespace: list[str]) -> Callable[..., tuple[int, str]]:
    """Exit code and output of a launch on one node, on a volume of this size; SIGTERM at the line."""

    def run(size: str, *flags: object, line: str = "") -> tuple[int, str]:
        (runs.folder / "volume").mkdir()
        launch = runs.command("launch", "volume/run", *flags, "--threads", 1, delay=0.01)
        whole = [*namespace, sys.executable, "-c", TOO_SMALL, str(runs.folder / "volume"), size, line]
        environment = {**runs.environment, "PYTHONPATH": str(SOURCE)}
        return runs.processes.run([*whole, *launch], cwd=runs.folder, env=environment)

    return run


def test_a_volume_that_is_full_at_the_start_is_a_mistake(
    runs: Runs, too_small: Callable[..., tuple[int, str]]
) -> None:
    code, output = too_small("4k", "--steps", 10)
    assert code == 2 and "Traceback" not in output, output
    assert f"run directory {runs.folder / 'volume' / 'run'}: No space left on device" in output


def test_a_volume_too_small_for_the_last_save_ends_the_run_without_restarts(
    too_small: Callable[..., tuple[int, str]],
) -> None:
    """Training reaches its end; the last save is tried as often as saves may fail."""
    code, output = too_small("32k", "--steps", 10, "--checkpoint-every", 10)
    assert code == 1 and "Traceback" not in output, output
    assert "step 10 of 10" in output and "restarting" not in output, output
    assert "No space left on device" in output.splitlines()[-1], output


def test_a_stop_on_a_full_volume_starts_the_ranks_once_more_at_most(
    too_small: Callable[..., tuple[int, str]],
) -> None:
    never = ("--steps", 100_000, "--checkpoint-every", 100_000, "--log-every", 10)
    code, output = too_small("32k", *never, line="| step 10 of")
    assert code == 137, output
    assert output.count("restarting all ranks") == 1, output
    assert "No space left on device" in output.splitlines()[-1], output


def test_a_run_outlives_a_full_volume(runs: Runs, full_for_a_while: Callable[..., str]) -> None:
    flags = ("--steps", 50, "--checkpoint-every", 5, "--threads", 1)
    train = runs.command("train", "volume/run", *flags, delay=0.2)
    output = full_for_a_while("step-000000010", "failed (2 in a row", train)
    assert "No space left on device; free space" in output and "Traceback" not in output
    assert output.split()[-3:] == ["step-000000040", "step-000000045", "step-000000050"]


@pytest.mark.soak
def test_the_last_step_is_saved_though_it_was_reached_on_a_full_volume(
    runs: Runs, full_for_a_while: Callable[..., str]
) -> None:
    flags = ("--nproc", 1, "--steps", 30, "--checkpoint-every", 10, "--eval-every", 10, "--threads", 1)
    launch = runs.command("launch", "volume/run", *flags, delay=0.2)
    output = full_for_a_while("step-000000020", "save at step 30 failed", launch)
    assert output.split()[-1] == "step-000000030", output
    assert "restarting" not in output, output


def test_a_reader_beside_a_slow_writer_always_finds_one(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    save(store, 1, 1)
    stop, wrong = threading.Event(), []

    def look() -> None:
        reader = CheckpointStore(store.directory)
        while not stop.is_set():
            newest = reader.newest(reader.verify, lambda step, problem: wrong.append(problem), False)
            if newest is None:
                wrong.append("none")

    thread = threading.Thread(target=look)
    thread.start()
    try:
        with slow(0.001):
            for step in range(2, 12):
                save(store, step, 1)
                store.prune(Retention(1))
    finally:
        stop.set()
        thread.join()
    assert wrong == [] and store.steps() == [11]
