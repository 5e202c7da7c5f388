"""`--json`: what each verb prints on standard output, held in golden files that docs/json.md shows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from json_shapes import merged, shape
from tandem import cli
from tandem.checkpoint.store import CheckpointStore
from tandem.config import Settings
from tandem.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden"
DOCS = Path(__file__).parents[2] / "docs" / "json.md"


def run(verb: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    cli.run(verb, [*words, "--json"], {})
    return json.loads(capsys.readouterr().out)  # nothing else is on standard output


def of_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    failed = {"state": "failed", "global_step": 3, "eval": {"loss": 0.5}}
    for name, summary in (("done", failed), ("new", {})):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "config.json").write_text('{"task": "digits"}')
        if summary:
            (folder / "runs" / name / "summary.json").write_text(json.dumps(summary))
    CheckpointStore(folder / "runs" / "kept" / "checkpoints").save(3, b"state", {})
    (folder / "runs" / "kept" / "config.json").write_text("[")
    return run("runs", [str(folder / "runs"), "--dry-run"], capsys)


def of_goodput(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    period = {"launch": 1.0, "began": 1.0, "seconds": {"train": 5.0}, "first": 0, "last": 9, "end": "stop"}
    lines = [period, {**period, "launch": 9.0, "began": 9.0}]
    (folder / "config.json").write_text("{}")
    (folder / "goodput.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run("runs", [str(folder), "--goodput"], capsys)


def of_checkpoints(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    store = CheckpointStore(folder / "checkpoints")
    for step in (10, 20, 30):
        store.save(step, b"state", {"eval": {"accuracy": 1 - step / 100}})
    (folder / "checkpoints" / "corrupt-step-000000005").mkdir()
    listed = run("checkpoints", ["ls", str(folder)], capsys)
    (store.path(20) / "state.pt").write_bytes(b"stale")
    verified = run("checkpoints", ["verify", str(folder)], capsys)
    pruned = run("checkpoints", ["prune", str(folder), "--keep", "1"], capsys)
    assert [each["step"] for each in pruned["removed"]] and store.steps() == [30]
    return [listed, verified, pruned]


def of_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    (folder / "config.json").write_text('{"newer": 1, "seed": 3}')
    words = ["--config", str(folder / "config.json"), "--lr", "0.5", "--task.width", "4"]
    found = run("config", words, capsys)
    assert found["settings"]["lr"] == {"value": 0.5, "source": "flag --lr"}
    assert found["settings"]["task.width"]["value"] == "4" and found["settings"]["steps"]["value"] is None
    return found


def of_health(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    return run("health", [], capsys)


def of_doctor(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    return run("doctor", ["--run-dir", str(folder)], capsys)


def of_doctor_join(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    from tandem.launch.join_check import CheckCoordinator, NodeUnderTest
    from tandem.launch.rendezvous import serve
    from tandem.platforms.environment import Placement

    # Node 1 does not come.
    placement = Placement("none", 2, 0, 1, "127.0.0.1", 0, nodes_share_host=True)
    settings = Settings.from_dict({"run_dir": str(folder)})
    node = NodeUnderTest(placement, settings, {}, lambda folder: ())
    coordinator = CheckCoordinator(serve(placement, 0), node, 2, 0.1)
    verdict = coordinator.run()
    assert [each["state"] for each in verdict["nodes"]] == ["pass", "fail"] and not verdict["unclear"]
    return {**verdict, "unclear": verdict["nodes"][1]["checks"]}


def of_eval(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    from tandem.launch.eval_command import format_scores

    return json.loads(
        format_scores(CheckpointStore(folder), 3, {"loss": float("nan"), "accuracy": 1.0}, 2, True)
    )


def of_bench(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    from tandem.verify.bench import Mode, _report

    ran = Mode("single", 1, "", [5.0], [7], [0.5])
    return _report(Settings(), 25, 1, "CPU", [ran, Mode("dp", 1, "needs two GPUs")])


def of_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    from tandem.verify.check import Finding, as_json

    found = [Finding("ok", "trains"), Finding("wrong", "differs", "my_task.py line 12: ")]
    assert as_json(Settings(), found[:1])["sound"] and not as_json(Settings(), found)["sound"]
    return as_json(Settings(), found)


def of_verify_resume(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    from tandem.verify.resume import Trial, as_json

    class Calm:
        step, world_size = 40, 2

        def digests(self) -> dict[str, str]:
            return {"weights": "a" * 64}

    trials = [Trial([(3, None), (5, 1)], [2]), Trial([(3, 0)], [0], "step 4: loss 1 and 2")]
    found = [as_json("digits", Calm(), trials[:1], None), as_json("digits", Calm(), trials, "why")]  # type: ignore[arg-type]
    assert [each["exact"] for each in found] == [True, False]
    return found


def of_audit(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    from tandem.verify.audit import DIFFERS, EXACT, AuditOptions, AuditTrial, AuditVerdict
    from tandem.verify.audit_findings import AuditFinding

    finding = AuditFinding("schedule", "0.1 instead of 0.01 at step 4", 4)
    bad = AuditTrial([3], [4, None], "loss differs", 4.0, [finding])
    asked = AuditOptions(["python", "train.py"])
    good = AuditVerdict(EXACT, None, [AuditTrial([3], [4], None)]).as_json(asked)
    findings = [(AuditFinding("ema", "differs"), 1), (finding, 1)]
    vague = AuditVerdict(DIFFERS, "why", [bad], findings).as_json(asked)
    return [vague, good]


VERBS: dict[str, Callable[[Path, pytest.CaptureFixture[str]], Any]] = {
    "runs": of_runs,
    "checkpoints": of_checkpoints,
    "config": of_config,
    "health": of_health,
    "doctor": of_doctor,
    "eval": of_eval,
    "bench": of_bench,
    "check": of_check,
    "verify-resume": of_verify_resume,
}
COMMANDS = {"verify-resume-command": of_audit, "runs-goodput": of_goodput, "doctor-join": of_doctor_join}
"""What a verb prints for another kind of target."""
RUNNING = ("memory", "profile", "stacks")
"""Verbs that need a running run; tests/faults/test_inspected_runs.py compares their output."""


@pytest.mark.parametrize("verb", [*VERBS, *COMMANDS])
def test_the_shape_is_the_golden_one(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {**VERBS, **COMMANDS}[verb](tmp_path, capsys)
    found = merged([shape(each) for each in found]) if isinstance(found, list) else shape(found)
    golden = (GOLDEN / f"{verb}.json").read_text()
    assert found == json.loads(golden), json.dumps(found, indent=2)
    assert f"```json\n{golden.strip()}\n```" in DOCS.read_text()


@pytest.mark.parametrize("verb", RUNNING)
def test_the_page_has_the_golden_shape(verb: str) -> None:
    assert f"```json\n{(GOLDEN / f'{verb}.json').read_text().strip()}\n```" in DOCS.read_text()


def test_every_verb_with_json_has_a_golden_file() -> None:
    with_json = {verb for verb in cli.VERBS if "--json" in cli.parser_of(verb)._option_string_actions}
    golden = {path.stem for path in GOLDEN.glob("*.json")} - set(COMMANDS)
    assert with_json == {*VERBS, *RUNNING} == golden


@pytest.mark.parametrize("verb", sorted([*VERBS, *RUNNING]))
def test_json_is_a_switch(verb: str) -> None:
    of_a_run = dict.fromkeys(("eval", "runs", "health", *RUNNING), ["run"])
    first = {"checkpoints": ["ls", "run"], "check": ["a.py"], **of_a_run}.get(verb, [])
    with pytest.raises(ConfigError) as caught:
        cli.parser_of(verb).read([*first, "--json", "found.json"])
    to_type = "--output found.json" if verb == "bench" else "> found.json"
    assert str(caught.value).startswith("--json: ") and to_type in str(caught.value)
    with pytest.raises(ConfigError, match="^--json: .*found.json"):
        cli.parser_of(verb).read([*first, "--json=found.json"])
