"""Folders that somebody else has filled: one line each, nothing hangs, fills memory or leaves its place."""

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.checkpoint.decision import decide_resume
from tandem.checkpoint.listing import list_checkpoints, newest_step, rule_of, table
from tandem.checkpoint.manifest import seal
from tandem.checkpoint.retention import Retention
from tandem.checkpoint.state import deserialize, deserialize_file, serialize
from tandem.checkpoint.store import CheckpointStore
from tandem.config import Settings
from tandem.errors import CheckpointError, CorruptCheckpointError, UnloadableError
from tandem.report.history import History
from tandem.run.directory import RunDir
from trials.store import newest_valid

pytestmark = pytest.mark.timeout(60)

STATE = b"the state"
INFO: dict[str, Any] = {"train_samples": 100, "eval": {"accuracy": 0.5}, "settings": {}, "fingerprint": {}}
TIB = 1 << 40
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Two checkpoints, as a run has made them."""
    made = CheckpointStore(tmp_path / "run" / "checkpoints")
    made.save(1, STATE, INFO)
    made.save(2, STATE, INFO)
    return made


def rewrite(store: CheckpointStore, change: Change) -> None:
    """Another manifest of step 2, with its own SHA-256: no damage, but malice."""
    path = store.path(2) / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["manifest_sha256"]
    change(body)
    path.write_bytes(seal(body))


def files(name: str, **entry: object) -> Change:
    return lambda body: body["files"].update({name: {**body["files"].pop("state.pt"), **entry}})


def info(**fields: object) -> Change:
    return lambda body: body["info"].update(fields)


def nested(levels: int) -> list[Any]:
    deep: list[Any] = []
    for _ in range(levels):
        deep = [deep]
    return deep


MALFORMED: dict[str, Change] = {
    "an absolute name": files("/dev/zero"),
    "a name above": files("../../state.pt"),
    "another name": files("other.bin"),
    "no files": lambda body: body.update(files={}),
    "files are gone": lambda body: body.pop("files"),
    "files are a list": lambda body: body.update(files=["state.pt"]),
    "two files": lambda body: body["files"].update({"state-0.pt": body["files"]["state.pt"]}),
    "an entry is text": lambda body: body.update(files={"state.pt": "whole"}),
    "bytes are text": files("state.pt", bytes="9"),
    "bytes are negative": files("state.pt", bytes=-1),
    "bytes are true": files("state.pt", bytes=True),
    "not a digest": files("state.pt", sha256=None),
    "a digest of another length": files("state.pt", sha256="00"),
    "the step is text": lambda body: body.update(step="2"),
    "the step is gone": lambda body: body.pop("step"),
    "the format is gone": lambda body: body.pop("format"),
    "the format is text": lambda body: body.update(format="1"),
    "the time is gone": lambda body: body.pop("written_at"),
    "the time is text": lambda body: body.update(written_at="now"),
    "the time is not finite": lambda body: body.update(written_at=float("inf")),
    "info is a list": lambda body: body.update(info=[]),
    "info is gone": lambda body: body.pop("info"),
    "scores are a list": info(eval=[1]),
    "a score beyond all numbers": info(eval={"accuracy": 10**400}),
    "settings are text": info(settings="all"),
    "the fingerprint is a number": info(fingerprint=7),
    "the task's fields are a list": info(fingerprint={"task_fields": ["width"]}),
    "samples are text": info(train_samples="many"),
    "samples are negative": info(train_samples=-5),
    "deep": info(more=nested(200)),
    "too deep for JSON": info(more=nested(900)),
}


def looked_at(store: CheckpointStore) -> list[int]:
    """Everything that reads manifests, none of which may raise what is not ours; the steps passed over."""
    passed: list[int] = []
    found = store.newest(store.info, lambda step, problem: passed.append(step), quarantine=False)
    assert found is not None and found[0] == 1
    rows = list_checkpoints(store, verify=True)
    assert {row.step: row.verified for row in rows} == {2: False, 1: True}
    assert "DAMAGED" in table(rows, store)
    assert store.scores(2) == {} and rule_of(store, best=None).newest > 0
    history = History(RunDir(store.directory.parent))
    assert [each["step"] for each in history.now()["checkpoints"]] == [1]  # type: ignore[attr-defined]
    settings = Settings().replace(run_dir=store.directory.parent)
    assert decide_resume(settings, store).step == 1
    assert store.quarantined() == ["corrupt-step-000000002-1"]
    return passed


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_manifest_is_damage_in_one_line(store: CheckpointStore, change: Change) -> None:
    try:
        rewrite(store, change)
    except RecursionError:
        pytest.skip("this Python cannot write it either")
    with pytest.raises(CorruptCheckpointError) as caught:
        store.verify(2)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert looked_at(store) == [2]


def test_a_manifest_of_a_later_format_is_no_damage(store: CheckpointStore) -> None:
    rewrite(store, lambda body: body.update(format=3))
    with pytest.raises(CheckpointError, match="has format 3") as caught:
        store.verify(2)
    assert not isinstance(caught.value, CorruptCheckpointError)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def elsewhere(path: Path) -> None:
    path.symlink_to(path.parent.parent / "step-000000001" / path.name)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, TIB)


@pytest.mark.parametrize("name", ["state.pt", "manifest.json"])
@pytest.mark.parametrize("instead", [fifo, endless, elsewhere, dangling, sparse, Path.mkdir])
def test_what_is_no_file_of_that_size_is_not_read(
    store: CheckpointStore, name: str, instead: Callable[[Path], None]
) -> None:
    (store.path(2) / name).unlink()
    instead(store.path(2) / name)
    with pytest.raises(CorruptCheckpointError):
        store.verify(2)
    with pytest.raises(CorruptCheckpointError):
        store.read(2)
    told: list[str] = []
    found = newest_valid(store, lambda step, problem: told.append(problem))
    assert found is not None and found[0] == 1 and len(told) == 1


def test_a_size_that_the_file_has_not_is_not_believed(store: CheckpointStore) -> None:
    rewrite(store, files("state.pt", bytes=TIB))
    with pytest.raises(CorruptCheckpointError, match=f"has 9 bytes, expected {TIB}"):
        store.read(2)


OTHER_NAMES = (
    "step-000000200.bak",
    "step-2",
    "step-0000000xx",
    "Step-000000009",
    "step-000000200 (copy)",
    "x",
)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_that_are_not_ours_do_not_count(store: CheckpointStore, name: str) -> None:
    os.rename(store.path(2), store.directory / name)
    (store.directory / name / "link").symlink_to("/proc/self/fd/99")
    assert store.steps() == [1] and newest_step(store) == 1
    assert newest_valid(store, lambda *_: pytest.fail("nothing is damaged")) == (1, STATE, INFO)
    assert [row.step for row in list_checkpoints(store)] == [1]
    store.save(3, STATE, INFO)
    assert (store.directory / name / "manifest.json").exists(), "it is left alone"


def repacked(raw: bytes, **options: Any) -> bytes:
    """The same records of a state, packed in another way."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(target, "w", **options) as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))
    return target.getvalue()


def test_a_state_that_grows_when_it_is_unpacked_is_refused() -> None:
    raw = serialize({"w": torch.zeros(1 << 20)})
    assert torch.equal(deserialize(raw)["w"], torch.zeros(1 << 20))
    small = repacked(raw, compression=zipfile.ZIP_DEFLATED)
    assert len(small) < len(raw) / 100
    with pytest.raises(CheckpointError, match="compressed") as caught:
        deserialize(small)
    assert "\n" not in str(caught.value)


def test_records_that_share_their_bytes_are_refused() -> None:
    raw = serialize({"w": torch.zeros(1 << 16)})
    with zipfile.ZipFile(io.BytesIO(raw)) as old:
        record = max(old.infolist(), key=lambda each: each.file_size)
        target = io.BytesIO(raw)
    with zipfile.ZipFile(target, "a") as new:
        for number in range(8):
            twin = zipfile.ZipInfo(f"{record.filename}{number}")
            for field in ("file_size", "compress_size", "CRC", "header_offset", "compress_type"):
                setattr(twin, field, getattr(record, field))
            new.filelist.append(twin)
        new._didModify = True  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="larger than the file"):
        deserialize(target.getvalue())


def test_a_damaged_directory_of_records_is_one_line() -> None:
    raw = serialize({"w": torch.zeros(8)})
    with pytest.raises(CheckpointError):
        deserialize(raw[:-30])


HUGE = 1 << 34


def many_names() -> dict[str, torch.Tensor]:
    one = torch.zeros(1 << 16)
    return {f"a{number}": one.view(-1) for number in range(2000)}


def laughs() -> list[Any]:
    found: list[Any] = []
    for _ in range(40):
        found = [found] * 10
    return found


def itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


BOMBS: dict[str, Callable[[], Any]] = {
    "stride 0": lambda: torch.zeros(1).expand(HUGE),
    "stride 0 in one dimension": lambda: torch.zeros(1 << 10).expand(1 << 20, 1 << 10),
    "overlapping rows": lambda: torch.zeros(1 << 16).as_strided((1 << 12, 1 << 12), (1, 1)),
    "meta": lambda: torch.empty(HUGE, device="meta"),
    "sparse": lambda: torch.sparse_coo_tensor(torch.tensor([[5]]), torch.tensor([1.0]), (HUGE,)),
    "sparse rows": lambda: torch.sparse_csr_tensor(
        torch.tensor([0, 1]), torch.tensor([5]), torch.ones(1), (1, HUGE)
    ),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.qint8).expand(HUGE),
    "names for one storage": many_names,
    "views of one storage": lambda: (lambda one: [one[n:] for n in range(200)])(torch.zeros(1 << 18)),
    "a list in a list": laughs,
    "a list in itself": itself,
}


@pytest.mark.parametrize("where", ["model", "optimizer"])
@pytest.mark.parametrize("name", BOMBS)
def test_a_state_that_needs_more_than_its_file_is_refused(name: str, where: str, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"model": {}, "optimizer": {}, where: {"state": {0: {"w": BOMBS[name]()}}}}, buffer)
    (tmp_path / "state.pt").write_bytes(buffer.getvalue())
    for load in (lambda: deserialize(buffer.getvalue()), lambda: deserialize_file(tmp_path / "state.pt", {})):
        with pytest.raises(UnloadableError) as caught:
            load()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400 and caught.value.exit_code == 2


def test_a_tied_weight_is_no_bomb() -> None:
    weight = torch.zeros(1 << 20)
    buffer = io.BytesIO()
    torch.save({"model": {f"layers.{number}": weight for number in range(12)}}, buffer)
    assert len(deserialize(buffer.getvalue())["model"]) == 12


def test_an_unloadable_checkpoint_is_passed_over_and_left_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (1, 2):
        store.save(step, serialize({"model": {}, "step": step}), INFO)
    buffer = io.BytesIO()
    torch.save({"model": {"w": torch.zeros(1).expand(HUGE)}}, buffer)
    for step in (3, 4):
        store.save(step, buffer.getvalue(), INFO)
    told: list[int] = []

    def look(fresh: CheckpointStore) -> tuple[int, Any] | None:
        return fresh.newest(
            lambda step: deserialize(fresh.read(step)[0]),
            lambda *_: pytest.fail("its bytes are right"),
            on_unloadable=lambda step, problem: told.append(step),
        )

    found = look(store)
    assert found is not None and found[0] == found[1]["step"] == 2 and told == [4, 3]
    assert store.steps() == [4, 3, 2, 1] and store.quarantined() == []
    store.save(5, serialize({"model": {}, "step": 5}), INFO)
    store.save(3, serialize({"model": {}, "step": 3}), INFO)  # trained once more
    assert store.prune(Retention(2)) == [1, 2], "those that cannot be loaded neither count nor go"
    assert store.steps() == [5, 4, 3] and store.unloadable == {4}
