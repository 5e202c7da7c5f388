"""`tandem verify-resume -- COMMAND`: names planted bugs in plain programs, and passes correct ones."""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
import torch

from forked import Forked
from patience import patient
from tandem import cli
from tandem.errors import ConfigError, RunFailedError
from tandem.signals import StopFlag
from tandem.verify import audit_files, audit_logs, audit_observer
from tandem.verify.audit import DIFFERS, EXACT, UNJUDGED, Audit, AuditOptions, AuditVerdict
from tandem.verify.audit_compare import Reference, RunOutputs
from tandem.verify.audit_findings import KINDS, Baseline, Step, align, from_logs, from_names, read_steps
from tandem.verify.audit_runner import Audited, launched

TRAINER = Path(__file__).parents[1] / "programs" / "trainer.py"
BUGS = {
    "optimizer-lost": "optimizer-lost",
    "optimizer-permuted": "optimizer-permuted",
    "schedule": "schedule",
    "data-restarts": "data-restarts",
    "order-repeats": "order-repeats",
    "skipped": "skipped",
    "repeated": "repeated",
    "fewer-steps": "fewer-steps",
    "random": "random",
    "augmentation": "random",
    "buffers": "buffers",
    "scaler": "scaler",
    "ema": "ema",
    "weights": "weights",
    "cannot-resume": "cannot-resume",
}


def popen(command: list[str], **options: Any) -> Any:
    """Fork the script from a process that has imported torch."""
    options.pop("preexec_fn")
    return Forked(command, text=True, **options)


def audited(folder: Path, kind: str, seed: int, kills: int = 1) -> tuple[AuditVerdict, list[str]]:
    source = folder / "source"
    source.mkdir()
    shutil.copy(TRAINER, source)
    asked = AuditOptions([sys.executable, TRAINER.name, kind, str(seed)], kills=kills)
    program = Audited(asked.command, source, dict(os.environ), folder, popen)
    said: list[str] = []
    verdict = Audit(asked, program, StopFlag(), said.append).run(random.Random(seed))
    return verdict, said + verdict.lines()


def test_a_missing_program_is_named_as_it_was_typed(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    asked = AuditOptions([sys.executable, "missing.py"])
    program = Audited(asked.command, tmp_path / "source", dict(os.environ), tmp_path, subprocess.Popen)
    with pytest.raises(RunFailedError, match="'missing.py'") as caught:
        Audit(asked, program, StopFlag(), lambda line: None).run(random.Random(0))
    assert caught.value.exit_code == 2 and str(tmp_path / "work") not in str(caught.value)


@pytest.mark.timeout(patient(120))
@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=[] if bug == "weights" else pytest.mark.slow) for bug in BUGS]
)
def test_a_planted_bug_is_named(tmp_path: Path, bug: str) -> None:
    # The first epoch of order-repeats is right, and so is a kill in it: two kills are in other steps.
    for seed in range(4):
        (tmp_path / str(seed)).mkdir()
        verdict, said = audited(tmp_path / str(seed), bug, seed)
        # After a kill in the last epoch, what is skipped is the end, and the run only has fewer steps.
        is_at_end = bug == "skipped" and [finding.kind for finding, _ in verdict.kinds] == ["fewer-steps"]
        if verdict.verdict != EXACT and not is_at_end:
            break
    assert verdict.verdict == DIFFERS and verdict.exit_code == 1, said
    assert [finding.kind for finding, _ in verdict.kinds] == [BUGS[bug]], said
    assert any(KINDS[BUGS[bug]].title in line for line in said)


@pytest.mark.timeout(patient(120))
@pytest.mark.parametrize(
    "kind, seed",
    [
        ("plain", 1),
        *(
            pytest.param(kind, seed, marks=pytest.mark.slow)
            for kind, seed in (("plain", 2), ("workers", 3), ("epochs", 4), ("manual", 5))
        ),
    ],
)
def test_a_correct_program_is_exact(tmp_path: Path, kind: str, seed: int) -> None:
    verdict, said = audited(tmp_path, kind, seed, kills=1 + (seed == 1))
    assert verdict.verdict == EXACT and verdict.exit_code == 0 and not verdict.kinds, said
    assert all(step is not None and step > 1 for trial in verdict.trials for step in trial.resumed_at), said


def test_a_program_that_fails_without_a_kill_is_no_finding(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("raise ValueError('no data')")
    asked = AuditOptions([sys.executable, "train.py"])
    program = Audited(asked.command, source, dict(os.environ), tmp_path, popen)
    with pytest.raises(RunFailedError, match="no data"):
        Audit(asked, program, StopFlag(), print).run(random.Random())


def test_a_program_that_leaves_nothing_is_not_judged(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("print('done')")
    asked = AuditOptions([sys.executable, "train.py"])
    verdict = Audit(
        asked, Audited(asked.command, source, dict(os.environ), tmp_path, popen), StopFlag(), print
    ).run(random.Random())
    assert verdict.verdict == UNJUDGED and verdict.exit_code == 1 and "{work}" in str(verdict.why)


# Readers


def test_files_are_read_without_running_them(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    weights = torch.arange(6.0).reshape(2, 3)
    state = {"w": weights.t(), "args": argparse.Namespace(lr=0.5), "evil": Evil(), "n": 3}
    torch.save(state, tmp_path / "a.pt")
    found = audit_files.read(tmp_path / "a.pt")
    assert torch.equal(torch.as_tensor(found["w"]), weights.t())
    assert (found["args.lr"], found["n"]) == (0.5, 3)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "cut.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:-200])
    with pytest.raises(audit_files.UnreadableError, match="cut.pt"):
        audit_files.read(tmp_path / "cut.pt")


def test_safetensors_numpy_and_dcp_are_read(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    weights = torch.randn(4, 3)
    safetensors.save_file({"w": weights.bfloat16()}, tmp_path / "a.safetensors")
    found = audit_files.read(tmp_path / "a.safetensors")["w"]
    assert torch.equal(torch.as_tensor(found), weights.bfloat16())
    np.savez(tmp_path / "a.npz", a=np.arange(3))
    assert audit_files.read(tmp_path / "a.npz")["a"].tolist() == [0, 1, 2]  # type: ignore[union-attr]
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": {"w": weights}, "step": 7}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    read = audit_files.read(tmp_path / "dcp" / audit_files.METADATA)
    assert torch.equal(torch.as_tensor(read["model.w"]), weights) and read["step"] == 7


def test_logs_of_known_formats_are_read(tmp_path: Path) -> None:
    state = {"log_history": [{"step": 5, "loss": 0.5, "epoch": 1.0}, {"step": 9, "eval_runtime": 3}]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    for version, text in enumerate(("0,1,0.5\n0,2,\n", "0,2,0.25\n")):
        text = f"epoch,step,train_loss\n{text}"
        (tmp_path / f"version_{version}").mkdir()
        (tmp_path / f"version_{version}" / "metrics.csv").write_text(text)
        os.utime(tmp_path / f"version_{version}" / "metrics.csv", (version, version))
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2.0, "time": 9}\nnoise\n{"step": 2, "lo')
    (tmp_path / "out.log").write_text("iter 3 | loss 0.125\n")
    paths = [PurePath(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")]
    found = audit_logs.read_logs(tmp_path, paths, re.compile(r"iter (?P<step>\d+) \| loss (?P<loss>\S+)"))
    series = {log: audit_logs.by_step(rows) for log, rows in found.items()}
    assert series["trainer_state.json"] == {"loss": {5: 0.5}, "epoch": {5: 1.0}}
    assert series["version_*/metrics.csv"]["train_loss"] == {1: 0.5, 2: 0.25}
    assert series["log.jsonl"] == {"loss": {1: 2.0}}
    assert series["out.log"] == {"loss": {3: 0.125}}


def test_event_files_of_tensorboard_are_read(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        writer.add_scalar("loss", 1.5, 3)
        writer.add_scalar("loss", 2.5, 4, new_style=True)
    paths = [PurePath(path.name) for path in tmp_path.iterdir()]
    rows = next(iter(audit_logs.read_logs(tmp_path, paths, None).values()))
    assert audit_logs.by_step(rows) == {"loss": {3: 1.5, 4: 2.5}}


def test_times_are_no_numbers_to_compare() -> None:
    names = ("time", "step_time", "train_samples_per_second", "eta", "wall.time", "runtime")
    assert all(map(audit_logs.TIMES.search, names))
    assert not any(map(audit_logs.TIMES.search, ("beta", "theta", "timesteps", "loss", "meta", "lifetime")))


# Comparison and kinds


def left(folder: Path, name: str, value: float, loss: float) -> RunOutputs:
    (folder / name).mkdir()
    torch.save({"w": torch.tensor([value, 1.0])}, folder / name / "a.pt")
    return RunOutputs(folder / name, [PurePath("a.pt")], {"loss": {1.0: 1.0, 2.0: loss}})


def test_what_differs_as_much_as_two_runs_do_is_noise(tmp_path: Path) -> None:
    reference = Reference(left(tmp_path, "one", 1.0, 0.5), left(tmp_path, "two", 1.001, 0.501))
    near = reference.compare(left(tmp_path, "near", 1.0012, 0.5003))
    assert not near and near.within_noise == 2
    far = reference.compare(left(tmp_path, "far", 1.1, 0.7))
    assert far.tensors == ["a.pt:w"] and far.first_step == 2.0


def test_a_repeatable_run_allows_no_difference(tmp_path: Path) -> None:
    reference = Reference(left(tmp_path, "one", 1.0, 0.5), left(tmp_path, "two", 1.0, 0.5))
    assert reference.is_exact
    assert reference.compare(left(tmp_path, "near", 1.0000001, 0.5)).tensors == ["a.pt:w"]


def test_a_number_that_the_kill_has_lost_from_a_log_is_no_difference(tmp_path: Path) -> None:
    one, two, three = (left(tmp_path, name, 1.0, 0.5) for name in ("one", "two", "three"))
    gap = RunOutputs(three.folder, three.files, {"loss": {2.0: 0.5}})
    found = Reference(one, two).compare(gap)
    assert not found and found.lost == 1
    early = RunOutputs(three.folder, three.files, {"loss": {1.0: 1.0}})
    assert Reference(one, two).compare(early).first_step == 2.0, "the end of a log is no gap"


def fetched_ahead(observer: Any, batches: list[torch.Tensor]) -> None:
    for position, batch in enumerate(batches):
        observer.after_fetch(1, [position], {"x": batch})


def test_batches_that_a_framework_fetches_ahead_keep_their_positions(tmp_path: Path) -> None:
    observer = audit_observer.Observer(torch, str(tmp_path))
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(2, 3) for _ in range(3)]
    fetched_ahead(observer, batches[:2])
    for at in range(3):
        if at == 1:
            fetched_ahead(observer, batches)
        observer.before_forward(model, (batches[at],))
        model(batches[at]).sum().backward()
        observer.before_step(optimizer, (optimizer,), {})
    (steps,) = read_steps(tmp_path)[0]
    assert [step.indices for step in steps] == [(0,), (1,), (2,)]


def test_a_step_with_a_closure_has_the_passes_of_its_closure(tmp_path: Path) -> None:
    """As in Lightning, or with LBFGS, which calls it several times."""
    observer = audit_observer.Observer(torch, str(tmp_path))
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    for batch in (torch.randn(2, 3), torch.randn(2, 3)):

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            observer.before_forward(model, (batch,))
            loss: torch.Tensor = model(batch).square().sum()
            loss.backward()
            return loss

        changed = observer.before_step(optimizer, (optimizer,), {"closure": closure})
        assert changed is not None
        optimizer.step(**changed[1])
    (steps,) = read_steps(tmp_path)[0]
    assert len(steps) == 2 and all(len(step.inputs) == 1 for step in steps)
    assert steps[0].inputs != steps[1].inputs and steps[0].grads != steps[1].grads


def run_of(steps: int, world: int = 1) -> list[Step]:
    return [Step(params=(str(at),), lr=(0.1,), inputs=(str(at),), world=world) for at in range(steps)]


def test_a_change_of_the_world_size_is_noticed() -> None:
    baseline = Baseline(run_of(6), run_of(6))
    found = align(baseline, [run_of(4), run_of(6, world=2)[3:]], finished=True)
    assert found.resumed_at == [4]
    assert [each.kind for each in found.findings] == ["world"]


def test_a_second_restart_has_no_findings_of_the_first() -> None:
    """Its weights are those that were saved, and already others than in the uninterrupted run."""
    before = [Step(params=(str(at),), grads=str(at), inputs=(str(at),)) for at in range(9)]
    after = [Step(params=(f"{at}b",), grads=f"{at}b", inputs=(str(at),)) for at in range(9)]
    lost = [Step(params=("3",), grads="3b", inputs=("3",), rng=(("torch", "b"),)), *after[4:7]]
    found = align(Baseline(before, before), [before[:5], lost, after[5:]], finished=True)
    assert found.resumed_at == [4, 6] and [each.kind for each in found.findings] == ["random"]


def test_a_process_that_is_killed_soon_shows_which_batch_it_began_with() -> None:
    """Not that samples are skipped, nor another order where the batch is that of an earlier epoch."""
    batches = ["a", "b", "c", "d", "e", "f"]
    base = [
        Step(
            params=(str(at),), grads=str(at), inputs=(batch,), indices=(2 * at % 6, 2 * at % 6 + 1),
            data_pass=at // 3,
        )  # fmt: skip
        for at, batch in enumerate(batches)
    ]
    killed = Step(params=("3",), grads="x", inputs=("a",), data_pass=0)
    found = align(Baseline(base, base), [base[:5], [killed]], finished=False)
    assert [each.kind for each in found.findings] == ["order-repeats"]
    other = Step(params=("4",), grads="x", inputs=("z",), indices=(1, 2), data_pass=0)
    found = align(Baseline(base, base), [base[:5], [other]], finished=False)
    assert [each.kind for each in found.findings] == ["random"]


def test_noise_gives_no_findings() -> None:
    """A program without a seed: no weights, batches or random states are repeatable."""

    def noisy(count: int) -> list[Step]:
        return [Step(params=(str(random.random()),), inputs=(str(random.random()),)) for _ in range(count)]

    killed = noisy(4)
    found = align(Baseline(noisy(6), noisy(6)), [killed, [killed[3], *noisy(2)]], finished=True)
    assert found.resumed_at == [4] and not found.findings


def test_without_steps_names_and_logs_say_what_they_can() -> None:
    equal = ["a.pt:model.weight"]
    for name, kind in {"ema.0": "ema", "scaler.scale": "scaler", "bn.running_mean": "buffers"}.items():
        assert [each.kind for each in from_names([f"a.pt:{name}"], equal)] == [kind]
    assert not from_names(["a.pt:model.weight"], ["a.pt:step"])
    before = {"lr": {1.0: 0.1, 2.0: 0.01}, "loss": {1.0: 1.0, 2.0: 0.5, 3.0: 0.2}}
    now = {"lr": {1.0: 0.1, 2.0: 0.1}, "loss": {1.0: 1.0, 2.0: 0.5}}
    assert {each.kind for each in from_logs(before, now)} == {"schedule", "fewer-steps"}


def test_every_kind_has_a_title_and_a_fix() -> None:
    assert all(kind.title and kind.fix for kind in KINDS.values())
    assert max(Counter(kind.title for kind in KINDS.values()).values()) == 1


# The command line


def test_launchers_start_the_command_unchanged() -> None:
    assert launched(["python", "train.py"], "none", 1) == ["python", "train.py"]
    assert launched(["train.py"], "none", 1) == [sys.executable, "train.py"]
    # A copy of the directory has no virtual environment.
    assert launched([".venv/bin/python", "x"], "none", 1) == [os.path.abspath(".venv/bin/python"), "x"]
    words = launched(["/env/bin/python", "train.py", "--lr", "1"], "torchrun", 2)
    assert words[:3] == ["/env/bin/python", "-m", "torch.distributed.run"] and "--nproc-per-node=2" in words
    assert words[-4:] == ["/env/bin/python", "train.py", "--lr", "1"]
    assert "--num_processes=2" in launched(["train.py"], "accelerate", 2)
    with pytest.raises(ConfigError, match="--launcher"):
        launched(["python", "train.py"], "none", 2)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--lr", "1", "--", "sh"], "--lr has no effect on a command"),
        (["--trials", "1", "--", "sh"], "use --kills"),
        (["--log", "(", "--", "sh"], "--log: '\\('"),
        (["--", "no-such-command"], "command not found"),
        (["--nproc", "2", "--", "sh"], "--nproc 2 needs --launcher"),
    ],
)
def test_mistakes_are_reported_before_anything_starts(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cli.run("verify-resume", words, {})


@pytest.mark.parametrize("verb, settings", [("verify-resume", ["--kills", "1"]), ("launch", [])])
def test_a_script_that_the_kernel_cannot_execute_is_one_line(
    tmp_path: Path, verb: str, settings: list[str]
) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/no/such/program\n")
    script.chmod(0o755)
    with pytest.raises(ConfigError, match="cannot execute .*train.sh: No such file"):
        cli.run(verb, [*settings, "--", str(script)], {})
