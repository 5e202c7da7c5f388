"""Every line of the resume decision, which reads manifests and leaves the bytes to rank 0."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoint.decision import ResumeDecision, decide_resume
from tandem.checkpoint.manifest import seal
from tandem.checkpoint.state import serialize
from tandem.checkpoint.store import CheckpointStore
from tandem.config import Settings
from tandem.errors import ConfigError, CorruptCheckpointError
from tandem.telemetry.clock import Clock
from tandem.telemetry.recorder import Recorder
from tandem.training.resume import _newest

TRAIN_SAMPLES = 1000


def make(**values: Any) -> Settings:
    return Settings.from_dict({"batch_size": 100, "epochs": 4, **values})


def save(store: CheckpointStore, step: int, settings: Settings, **more: Any) -> None:
    info = {
        **more,
        "settings": settings.to_dict(),
        "fingerprint": settings.fingerprint_fields(),
        "train_samples": TRAIN_SAMPLES,
    }
    store.save(step, serialize({"model": {}, "mark": f"state {step}"}), info)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints")


@pytest.fixture
def other(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "other" / "checkpoints")


def begin(decision: ResumeDecision) -> tuple[str, int]:
    return decision.kind, decision.step


def test_auto_takes_the_newest_or_begins_afresh(store: CheckpointStore) -> None:
    assert decide_resume(make(), store) == ResumeDecision("fresh")
    for step in (10, 20):
        save(store, step, make())
    assert decide_resume(make(), store) == ResumeDecision("resume", 20)


@pytest.mark.parametrize(
    ("then", "now", "kept"), [(None, None, 6), (50, 50, 6), (None, 50, None), (50, None, None)]
)
def test_a_micro_batch_that_fit_is_kept_unless_the_setting_has_changed(
    store: CheckpointStore, then: int | None, now: int | None, kept: int | None
) -> None:
    save(store, 20, make(micro_batch_size=then), micro_batch_fits=6)
    assert decide_resume(make(micro_batch_size=now), store).micro_batch == kept


def test_a_damaged_manifest_is_quarantined(store: CheckpointStore) -> None:
    for step in (10, 20):
        save(store, step, make())
    (store.path(20) / "manifest.json").write_bytes(b"{}")
    assert begin(decide_resume(make(), store)) == ("resume", 10)
    assert (store.directory / "corrupt-step-000000020-1").is_dir()


def test_a_missing_manifest_is_told_and_its_step_can_be_saved_again(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy without manifests started at step 0 without a warning, and its saves blamed another writer."""
    for step in (10, 20):
        save(store, step, make())
    (store.path(20) / "manifest.json").unlink()
    assert begin(decide_resume(make(), store)) == ("resume", 10)
    assert (store.directory / "corrupt-step-000000020-1" / "state.pt").exists()
    assert any("step 20" in line and "manifest.json is missing" in line for line in caplog.messages)
    save(store, 20, make())
    for step in (10, 20):
        (store.path(step) / "manifest.json").unlink()
    assert begin(decide_resume(make(), store)) == ("fresh", 0)
    assert any("no valid checkpoint" in line for line in caplog.messages)


def test_a_start_from_nothing_left_is_told(store: CheckpointStore, caplog: pytest.LogCaptureFixture) -> None:
    def told() -> int:
        return sum("no valid checkpoint" in line and "step 0" in line for line in caplog.messages)

    assert begin(decide_resume(make(), store)) == ("fresh", 0) and not told(), "nothing was there"
    for step in (10, 20):
        save(store, step, make())
        (store.path(step) / "manifest.json").write_bytes(b"")
    assert begin(decide_resume(make(), store)) == ("fresh", 0) and told() == 1
    save(store, 10, make())
    (store.path(10) / "state.pt").write_bytes(b"")
    assert found_by_rank_0(store, decide_resume(make(), store)) == (0, "") and told() == 2


def test_a_complete_run_has_been_read_back(store: CheckpointStore) -> None:
    for step in (39, 40):
        save(store, step, make())
    (store.path(40) / "state.pt").write_bytes(b"State 40")
    assert begin(decide_resume(make(), store)) == ("resume", 39)
    assert store.steps() == [39]


def test_parts_of_uneven_lengths_have_more_steps_than_whole_batches(store: CheckpointStore) -> None:
    save(store, 45, make(), steps_per_epoch=12)
    assert begin(decide_resume(make(), store)) == ("resume", 45)
    save(store, 48, make(), steps_per_epoch=12)
    assert begin(decide_resume(make(), store)) == ("complete", 48)


def found_by_rank_0(store: CheckpointStore, decision: ResumeDecision) -> tuple[int, str]:
    found = _newest(store, None, decision, Recorder(1, 8, lambda message: None, Clock()))
    return found.step, str((found.state or {}).get("mark", ""))


def test_rank_0_reads_along_the_decision(store: CheckpointStore, other: CheckpointStore) -> None:
    for step in (10, 20, 30):
        save(store, step, make())
    (store.path(30) / "state.pt").write_bytes(b"State 30")
    decision = decide_resume(make(resume="required"), store)
    assert begin(decision) == ("resume", 30) and store.steps() == [30, 20, 10], "the bytes are rank 0's"
    assert found_by_rank_0(store, decision) == (20, "state 20")
    assert (store.directory / "corrupt-step-000000030-1").is_dir() and store.steps() == [20, 10]
    for step in (10, 20):
        (store.path(step) / "state.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match="no valid checkpoint"):
        found_by_rank_0(store, decision)
    assert found_by_rank_0(store, decide_resume(make(), store)) == (0, "")
    for step in (10, 20):
        save(other, step, make())
    (other.path(20) / "state.pt").write_bytes(b"")
    decision = decide_resume(make(resume=str(other.directory)), store)
    assert found_by_rank_0(store, decision) == (10, "state 10") and other.steps() == [20, 10], "only read"
    save(store, 30, make())
    assert found_by_rank_0(store, decision) == (30, "state 30"), "an earlier world of this launch saved it"


def test_a_state_is_read_once(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        save(store, step, make())
    opened, real = [], os.open

    def count(path: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(Path(path).name)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", count)
    found_by_rank_0(store, decide_resume(make(), store))
    assert opened.count("state.pt") == 1


def test_required_names_the_directory(store: CheckpointStore) -> None:
    with pytest.raises(ConfigError, match=str(store.directory)) as caught:
        decide_resume(make(resume="required"), store)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    save(store, 10, make())
    assert begin(decide_resume(make(resume="required"), store)) == ("resume", 10)


def test_never_moves_aside(store: CheckpointStore) -> None:
    assert decide_resume(make(resume="never"), store).moved_to is None
    save(store, 10, make(seed=3))
    decision = decide_resume(make(resume="never"), store)
    assert begin(decision) == ("fresh", 0) and store.steps() == []
    assert decision.moved_to is not None and CheckpointStore(decision.moved_to).steps() == [10]
    assert os.listdir(store.directory.parent) == [decision.moved_to.name]


def test_a_path_elsewhere(store: CheckpointStore, other: CheckpointStore) -> None:
    for step in (10, 20, 30):
        save(other, step, make())
    (other.path(30) / "state.pt").write_bytes(b"")
    save(store, 25, make())
    run = other.directory.parent
    decision = decide_resume(make(resume=str(run)), store)
    assert begin(decision) == ("resume", 20), "what lies here is not moved aside for bytes that do not hold"
    assert decision.elsewhere == tuple((other.directory, step) for step in (30, 20, 10))
    assert other.steps() == [30, 20, 10]  # only read
    assert decision.moved_to is not None and store.steps() == []
    for text in (f"{run}@10", str(other.path(10))):
        assert begin(decide_resume(make(resume=text), store)) == ("resume", 10)
    save(store, 25, make())
    with pytest.raises(CorruptCheckpointError):
        decide_resume(make(resume=f"{run}@30"), store)
    assert store.steps() == [25]
    for text in (f"{run}@11", f"{run}-no", str(run.parent)):
        with pytest.raises(ConfigError):
            decide_resume(make(resume=text), store)


def test_going_back_within_a_run(store: CheckpointStore) -> None:
    for step in (10, 20, 30):
        save(store, step, make())
    decision = decide_resume(make(resume=f"{store.directory.parent}@20"), store)
    assert begin(decision) == ("resume", 20) and store.steps() == [20, 10]
    assert decision.moved_to is not None and CheckpointStore(decision.moved_to).steps() == [30]


def test_the_same_command_again_goes_on(store: CheckpointStore, other: CheckpointStore) -> None:
    save(other, 10, make())
    again = make(resume=str(other.directory.parent))
    save(store, 17, again)
    decision = decide_resume(again, store)
    assert begin(decision) == ("resume", 17) and decision.elsewhere == ((other.directory, 10),)
    assert decision.moved_to is None and "step 17" in decision.changes[0]


def test_complete_is_measured_in_steps(store: CheckpointStore) -> None:
    save(store, 40, make())
    assert begin(decide_resume(make(), store)) == ("complete", 40)
    assert begin(decide_resume(make(epochs=5), store)) == ("resume", 40)
    assert begin(decide_resume(make(steps=40), store)) == ("complete", 40)
    assert begin(decide_resume(make(steps=41), store)) == ("resume", 40)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"batch_size": 200}, "batch_size was 100 and is 200"),
        ({"seed": 7}, "seed was 0 and is 7"),
        ({"precision": "bf16"}, "precision was fp32 and is bf16"),
        ({"optimizer": "adam"}, "optimizer was sgd and is adam"),
        ({"task_fields": {"noise": "3"}}, "task.noise was not set and is 3"),
    ],
)
@pytest.mark.parametrize("resume", ["auto", "required", "path"])
def test_another_fingerprint_is_refused(
    store: CheckpointStore, other: CheckpointStore, values: dict[str, Any], said: str, resume: str
) -> None:
    for each in (store, other):
        save(each, 40, make())
    text = str(other.directory.parent) if resume == "path" else resume
    with pytest.raises(ConfigError, match=said) as caught:
        decide_resume(make(resume=text, **values), store)
    assert "\n" not in str(caught.value)
    assert store.steps() == [40] and other.steps() == [40]  # nothing was touched


def test_rotten_bytes_refuse_nothing(store: CheckpointStore) -> None:
    """Another run's checkpoint is refused where it is whole; where it is not, the one before it counts."""
    save(store, 10, make())
    save(store, 20, make(seed=1))
    with pytest.raises(ConfigError, match="seed was 1 and is 0 now"):
        decide_resume(make(), store)
    assert store.steps() == [20, 10] and not store.quarantined()
    (store.path(20) / "state.pt").write_bytes(b"state 99")
    assert begin(decide_resume(make(), store)) == ("resume", 10)
    assert store.quarantined() == ["corrupt-step-000000020-1"]


def test_an_address_spelled_as_a_path_is_the_same(store: CheckpointStore) -> None:
    """Checkpoints from before say s3:/bucket where the settings say s3://bucket."""
    settings = make(run_dir="s3://bucket/run", init_from="s3:/bucket/other")
    assert settings.to_dict()["run_dir"] == "s3://bucket/run"
    assert settings.to_dict()["init_from"] == "s3://bucket/other"
    old = {**settings.to_dict(), "run_dir": "s3:/bucket/run"}
    info = {"settings": old, "fingerprint": settings.fingerprint_fields(), "train_samples": TRAIN_SAMPLES}
    store.save(10, b"state", info)
    assert decide_resume(settings, store).changes == ()


def test_other_changes_are_told(store: CheckpointStore) -> None:
    save(store, 10, make())
    changes = decide_resume(make(lr=0.05, nodes=2, epochs=9), store).changes
    assert len(changes) == 3 and "lr was 0.1 and is 0.05 now" in changes
    assert any(line.startswith("nodes") and "bits" in line for line in changes)


@dataclass
class Newer:
    """The settings of another version of tandem, which knows one more that decides the bits, and one more."""

    settings: Settings

    def to_dict(self) -> dict[str, Any]:
        return {**self.settings.to_dict(), "clip_share": 0.5}

    def fingerprint_fields(self) -> dict[str, Any]:
        return {**self.settings.fingerprint_fields(), "clip_share": 0.5}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.settings, name)


def test_a_setting_that_one_version_does_not_know(store: CheckpointStore, other: CheckpointStore) -> None:
    """A version that goes back, or forward, by one setting can read the checkpoints of the other."""
    save(store, 10, Newer(make()))  # type: ignore[arg-type]
    decision = decide_resume(make(), store)
    assert begin(decision) == ("resume", 10)
    (change,) = decision.changes
    assert "clip_share is 0.5; not compared" in change and "is running" in change
    save(other, 10, make())
    (change, *more) = decide_resume(Newer(make()), other).changes
    assert "not compared" in change and "saved the checkpoint" in change
    with pytest.raises(ConfigError, match="seed was 0 and is 7"):
        decide_resume(make(seed=7), store)
    again = make(resume=str(other.directory.parent))
    save(store, 17, Newer(again))  # type: ignore[arg-type]
    assert begin(decide_resume(again, store)) == ("resume", 17), "the same command, by another version"


def test_what_differs_is_named_without_secrets(store: CheckpointStore) -> None:
    before = {"api_key": "correct-horse", "url": "http://me:battery1@there", "width": "3"}
    save(store, 10, make(task_fields=before))
    now = {"api_key": "staple-horse", "url": "http://me:battery2@there", "width": "4"}
    with pytest.raises(ConfigError) as caught:
        decide_resume(make(task_fields=now), store)
    said = str(caught.value)
    assert all(name in said for name in ("task.api_key", "task.url", "task.width was 3 and is 4"))
    assert "horse" not in said and "battery" not in said


def test_a_damaged_manifest_is_told_without_its_values(store: CheckpointStore) -> None:
    save(store, 10, make())
    path = store.path(10) / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["manifest_sha256"]
    body["info"]["settings"] = "password=correct-horse"
    path.write_bytes(seal(body))
    with pytest.raises(CorruptCheckpointError, match="settings") as caught:
        store.verify(10)
    assert "correct-horse" not in str(caught.value)
