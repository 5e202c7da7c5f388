"""What is saved, the fingerprint of weights, and every line of the resume decision."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tandem.checkpoint.state import ResumeDecision, decide_resume, deserialize, serialize, weights_sha256
from tandem.checkpoint.store import CheckpointStore
from tandem.config import Settings
from tandem.errors import CheckpointError, ConfigError, CorruptCheckpointError

TRAIN_SAMPLES = 1000


def make(**values: Any) -> Settings:
    return Settings.from_dict({"batch_size": 100, "epochs": 4, **values})


def save(store: CheckpointStore, step: int, settings: Settings) -> None:
    info = {
        "settings": settings.to_dict(),
        "fingerprint": settings.fingerprint_fields(),
        "train_samples": TRAIN_SAMPLES,
    }
    store.save(step, b"state %d" % step, info)


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
    decision = decide_resume(make(), store)
    assert begin(decision) == ("resume", 20) and decision.directory == store.directory
    assert decision.changes == [] and decision.info["train_samples"] == TRAIN_SAMPLES


def test_auto_falls_back_from_damage(store: CheckpointStore) -> None:
    for step in (10, 20):
        save(store, step, make())
    (store.path(20) / "state.pt").write_bytes(b"State 20")
    decision = decide_resume(make(), store)
    assert begin(decision) == ("resume", 10) and decision.quarantined[0][0] == 20
    assert (store.directory / "corrupt-step-000000020-1").is_dir()


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
    assert begin(decision) == ("resume", 20) and decision.directory == other.directory
    assert decision.quarantined[0][0] == 30 and other.steps() == [30, 20, 10]  # only read
    assert decision.moved_to is not None and store.steps() == []
    for text in (f"{run}@10", str(other.path(10))):
        assert begin(decide_resume(make(resume=text), store)) == ("resume", 10)
    with pytest.raises(CorruptCheckpointError):
        decide_resume(make(resume=f"{run}@30"), store)
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
    assert begin(decision) == ("resume", 17) and decision.directory == store.directory
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
        ({"precision": "bf16"}, "precision was 'fp32' and is 'bf16'"),
        ({"optimizer": "adam"}, "optimizer was 'sgd' and is 'adam'"),
        ({"task_fields": {"noise": "3"}}, "task.noise was None and is '3'"),
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


def test_other_changes_are_told(store: CheckpointStore) -> None:
    save(store, 10, make())
    changes = decide_resume(make(lr=0.05, nodes=2, epochs=9), store).changes
    assert len(changes) == 3 and "lr was 0.1 and is 0.05 now" in changes
    assert any(line.startswith("nodes") and "bits" in line for line in changes)


def test_weights_sha256_is_what_the_design_says() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode() + b"\0" + str(value.dtype).encode() + str(tuple(value.shape)).encode())
        digest.update(value.numpy().astype(value.numpy().dtype.newbyteorder("<")).tobytes())
    assert weights_sha256(module) == digest.hexdigest()


def test_weights_sha256_sees_buffers_dtypes_and_nothing_else() -> None:
    module = nn.BatchNorm1d(4)
    before = weights_sha256(module)
    module.weight.grad = torch.ones(4)
    assert weights_sha256(module.eval()) == before
    module.num_batches_tracked += 1
    assert weights_sha256(module) != before
    for dtype in (torch.bfloat16, torch.float16, torch.bool, torch.complex64):
        odd = nn.Module()
        odd.register_buffer("values", torch.ones(2, 3).T.to(dtype))
        odd.register_buffer("empty", torch.empty(0, 3))
        odd.register_buffer("scalar", torch.tensor(1))
        assert len(weights_sha256(odd)) == 64


def test_a_compiled_module_has_the_digest_of_its_original() -> None:
    module = nn.Linear(1, 1)
    assert weights_sha256(torch.compile(module)) == weights_sha256(module)  # type: ignore[arg-type]


def test_a_transposed_view_hashes_as_its_copy() -> None:
    view, copy = nn.Module(), nn.Module()
    view.register_buffer("w", torch.arange(6).reshape(2, 3).T)
    copy.register_buffer("w", torch.arange(6).reshape(2, 3).T.contiguous())
    assert weights_sha256(view) == weights_sha256(copy)


def test_state_round_trip() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "step": 3,
        "notes": {"name": "x", "pair": (1, 2.5), "none": None},
    }
    back = deserialize(serialize(state))
    assert back["step"] == 3 and back["notes"] == state["notes"]
    assert torch.equal(back["model"]["weight"], model.weight)
    optimizer.load_state_dict(back["optimizer"])
    scheduler.load_state_dict(back["scheduler"])


class Odd:
    pass


@pytest.mark.parametrize("value", [Odd(), {"deep": [Odd()]}, lambda: 1])
def test_what_could_not_be_loaded_is_not_saved(value: object) -> None:
    with pytest.raises(CheckpointError, match="'extra' cannot be saved") as caught:
        serialize({"step": 1, "extra": value})
    assert "\n" not in str(caught.value)


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"model": Evil()}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError):
        deserialize((tmp_path / "state.pt").read_bytes())
    for junk in (b"", b"junk", b"no zip file", bytes(100), b"PK" + bytes(100)):
        with pytest.raises(CheckpointError):
            deserialize(junk)
    assert not (tmp_path / "ran").exists()


def test_torch_save_straight_into_the_store(store: CheckpointStore) -> None:
    weights = torch.randn(300, 300)
    store.save(1, lambda sink: torch.save({"w": weights}, sink), {})  # type: ignore[arg-type]
    store.verify(1)
    assert torch.equal(deserialize(store.read(1)[0])["w"], weights)
