"""`tandem verify-resume`: passes a sound task, and says what is wrong with one that is not."""

import signal

import pytest
from small_runs import TASK, Runs

from tandem.signals import StopFlag
from tandem.verify.resume import Runner
from tandem.verify.watched_run import Kill, NothingResumedError

pytestmark = pytest.mark.timeout(300)

OWN_GENERATOR = TASK.replace(
    "        out = model(x)",
    "        if not hasattr(self, 'generator'):\n"
    "            self.generator = torch.Generator().manual_seed(3)\n"
    "        x = x + 0.1 * torch.randn(x.shape, generator=self.generator)\n"
    "        out = model(x)",
)
GLOBAL_GENERATORS = TASK.replace(
    "        out = model(x)",
    "        import random, numpy\n"
    "        x = x + 0.1 * torch.randn(x.shape) + 0.1 * random.random() + 0.1 * numpy.random.rand()\n"
    "        out = model(x)",
)


def verify(runs: Runs, trials: int, *flags: object) -> tuple[int, str]:
    command = runs.command("verify-resume", "unused", "--trials", trials, "--nproc", 2, *flags, delay=0.01)
    code, output = runs.processes.wait(
        runs.processes.start(command, cwd=runs.folder, env=runs.environment), limit=200
    )
    return int(code), str(output)


@pytest.mark.soak
def test_a_sound_task_passes(runs: Runs) -> None:
    (runs.folder / "small.py").write_text(GLOBAL_GENERATORS)
    code, output = verify(runs, 2, "--optimizer", "adamw", "--clip-norm", 1)
    lines = output.splitlines()
    assert code == 0, output
    assert lines[-1] == "verdict: exact; 2 of 2 killed runs are bit-identical to the uninterrupted run"
    assert [line.split(":")[0] for line in lines[2:4]] == ["trial 1 of 2", "trial 2 of 2"]
    assert "40 steps on 2 ranks" in lines[0] and lines[3].count("at step") == 2, "twice in a row"
    assert not (runs.folder / "unused").exists(), "everything happens elsewhere"


def test_a_generator_of_ones_own_is_found(runs: Runs) -> None:
    (runs.folder / "small.py").write_text(OWN_GENERATOR)
    code, output = verify(runs, 1)
    assert code == 1, output
    verdict, reason = output.splitlines()[-2:]
    assert verdict == "verdict: not exact; 1 of 1 killed run differs"
    assert reason.startswith("reason: uninterrupted runs agree.")
    assert "`loss` differs at step" in output and "weights differ at the end, first" in output


def runner(runs: Runs, delay: float) -> Runner:
    flags = runs.command("verify-resume", "unused", "--nproc", 2, delay=delay)[4:]
    folder = runs.folder / "trials"
    folder.mkdir()
    return Runner(flags, {**runs.environment, "PYTHONPATH": str(runs.folder)}, folder, 40, StopFlag())


def test_a_kill_of_every_process_comes_after_the_first_checkpoint(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.folder)
    trials = runner(runs, delay=0.02)
    trial = trials.trial(trials.uninterrupted(), [Kill(1)], save_every=15)
    assert trial.kills[0][0] >= 15 and trial.resumed_from[0] >= 15, trial
    assert trial.difference is None


def test_a_run_that_begins_again_at_step_0_proves_nothing(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.folder)
    trials = runner(runs, delay=0.05)
    trials.arguments = [*trials.arguments, "--snapshot-every", "never"]
    with pytest.raises(NothingResumedError):
        trials.trial(trials.uninterrupted(), [Kill(1, 0)], save_every=40)


@pytest.mark.soak
def test_a_task_that_cannot_run_is_said_with_its_code(runs: Runs) -> None:
    (runs.folder / "small.py").write_text(TASK.replace("out = model(x)", "out = model(undefined)"))
    code, output = verify(runs, 1)
    assert code == 1 and "undefined" in output and "Traceback" not in output, output
    code, output = verify(runs, 1, "--lr", "-1")
    assert code == 2 and "--lr" in output, output


@pytest.mark.soak
def test_nothing_is_left_after_a_stop(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> None:
    scratch = tmp_path_factory.mktemp("scratch")  # short: a fork server's socket is below it
    environment = {**runs.environment, "TMPDIR": str(scratch)}
    command = runs.command("verify-resume", "unused", delay=1.0)
    process = runs.processes.start(command, cwd=runs.folder, env=environment)
    runs.until(lambda: bool(list(scratch.glob("tandem-verify-*/run-1"))), "first run")
    process.send_signal(signal.SIGTERM)
    code, output = runs.processes.wait(process)
    assert code == 137 and "stopped by SIGTERM" in output, output
    assert not list(scratch.glob("tandem-verify-*"))
