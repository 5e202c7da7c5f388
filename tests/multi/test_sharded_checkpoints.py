"""Each rank writes its shard of a checkpoint: other numbers of ranks, other strategies, killed writers."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_ranks import Trainer, in_ranks, killed_here

from needs import require_strategy
from tandem.checkpoint.sharded import read_state
from tandem.checkpoint.state import serialize
from tandem.checkpoint.store import CheckpointStore
from tandem.errors import CheckpointError, ConfigError, CorruptCheckpointError
from tandem.training.shards import check_shared

pytestmark = [pytest.mark.multi, pytest.mark.timeout(180)]


@pytest.fixture(autouse=True)
def _has_fsdp() -> None:
    require_strategy("fsdp")


def digest(state: Any) -> str:
    """The bits of every tensor, and everything else."""
    whole = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=repr):
                whole.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        elif isinstance(value, torch.Tensor):
            whole.update(f"{value.dtype}{tuple(value.shape)}".encode())
            whole.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            whole.update(repr(value).encode())

    add({part: state[part] for part in ("model", "optimizer")})
    return whole.hexdigest()


def saves(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Go on from the newest checkpoint, and save after the last of `steps` steps."""
    found = trainer.begins()
    before = trainer.full_state()
    loaded = digest(before) if trainer.world.is_first else ""
    for _ in range(steps):
        trainer.takes_step()
    with trainer.saver as saver:
        if steps:
            saver.save(trainer.step)
    if saver.writes and steps:
        saver.end(trainer.step, finished=True)
    whole = trainer.full_state()
    return {"first": found.step, "source": found.source, "loaded": loaded,
            "trained": digest(whole) if trainer.world.is_first else ""}  # fmt: skip


@pytest.mark.core
def test_other_numbers_of_ranks_and_other_strategies_read_the_same_state(tmp_path: Path) -> None:
    before = in_ranks(saves, tmp_path, 4, 2)[0]
    store = CheckpointStore(tmp_path / "checkpoints")
    assert len(store.manifest(2)["files"]) == 5
    step = 2
    for kind in ("fsdp 3", "fsdp 2", "fsdp 4", "single 1", "fsdp 2", "ddp 2", "fsdp 3"):
        name, size = kind.split()[0], int(kind.split()[1])
        found = in_ranks(saves, tmp_path, size, 1, name)[0]
        assert (found["first"], found["source"]) == (step, "checkpoint"), (size, name)
        assert found["loaded"] == before["trained"], (size, name)
        assert digest(read_state(store, step)[0]) == before["trained"]
        step += 1
        before = found
    store.verify(step)
    assert len(store.manifest(step)["files"]) == 4


def dies(trainer: Trainer, how: tuple[int, str]) -> None:
    """Save a step; the rank is killed while its thread does what the second value says."""
    rank, method = how
    trainer.begins()
    trainer.takes_step()
    with trainer.saver as saver:
        if trainer.world.rank == rank:
            writer: Any = saver._writer
            owner: Any = writer if hasattr(writer, method) else writer._store
            setattr(owner, method, lambda *_, **__: killed_here())
        saver.save(trainer.step)


@pytest.mark.parametrize(
    ("rank", "method"),
    [(0, "_lead"), (1, "_write_file"), (2, "_wait"), (0, "_wait"), (0, "publish")],
    ids=["before any file", "before a file", "before it begins", "between files", "before the manifest"],
)
def test_a_rank_killed_in_a_save_leaves_the_older_checkpoint(tmp_path: Path, rank: int, method: str) -> None:
    calm = in_ranks(saves, tmp_path, 3, 1)[0]
    in_ranks(dies, tmp_path, 3, (rank, method), killed=[rank])
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.steps() == [1] and store.without_manifest() == []
    found = in_ranks(saves, tmp_path, 3, 1)[0]
    assert (found["first"], found["loaded"]) == (1, calm["trained"])
    assert sorted(path.name for path in store.directory.iterdir()) == ["step-000000001", "step-000000002"]
    store.verify(2)


def test_rows_that_one_rank_finds_damaged_make_all_fall_back(tmp_path: Path) -> None:
    in_ranks(saves, tmp_path, 3, 1)
    in_ranks(saves, tmp_path, 3, 1)
    store = CheckpointStore(tmp_path / "checkpoints")
    last = store.path(2) / "shard-00002-of-00003.bin"
    raw = bytearray(last.read_bytes())
    raw[8] ^= 1
    last.write_bytes(raw)
    found = in_ranks(saves, tmp_path, 3, 0)
    assert [each["first"] for each in found] == [1, 1, 1]
    assert store.quarantined() == ["corrupt-step-000000002-1"]


def misses(trainer: Trainer, _: Any) -> str:
    """Rank 1 has another volume at the path of the checkpoints."""
    if trainer.world.rank == 1:
        CheckpointStore.use = lambda *_: missing()  # type: ignore[method-assign]
    try:
        trainer.begins()
    except CheckpointError as error:
        return str(error)
    return ""


def missing() -> Any:
    raise CorruptCheckpointError("shard-00001-of-00002.bin is missing")


def test_a_rank_without_the_volume_does_not_make_checkpoints_look_damaged(tmp_path: Path) -> None:
    in_ranks(saves, tmp_path, 2, 1)
    context = in_ranks(misses, tmp_path, 2, kept=[0])
    assert "rank 1 cannot read checkpoint step 1, which is valid on node 0" in context[0]
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.steps() == [1] and store.quarantined() == []


def full_volume(trainer: Trainer, _: Any) -> list[Any]:
    """Rank 1 cannot write at first; then the last save is tried again."""
    trainer.begins()
    trainer.takes_step()
    store: Any = trainer.saver._writer._store
    add = store.add
    left = [2]

    def refuses(*given: Any) -> Any:
        left[0] -= 1
        if trainer.world.rank == 1 and left[0] >= 0:
            raise CheckpointError("no space left")
        return add(*given)

    store.add = refuses
    trainer.saver.save(trainer.step)
    trainer.saver._writer.join_quietly()
    failed = trainer.saver._writer.problem
    trainer.saver.end(trainer.step, finished=True)
    return [failed, trainer.saver.last_step]


def test_a_rank_that_cannot_write_fails_the_save_on_all_and_it_is_tried_again(tmp_path: Path) -> None:
    found = in_ranks(full_volume, tmp_path, 2)
    assert all("rank 1: no space left" in failed and last == 1 for failed, last in found)
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [1]


def shares(trainer: Trainer, folders: list[str]) -> str:
    """Each rank is a node that sees another folder."""
    import dataclasses

    world = trainer.world
    world.position = dataclasses.replace(world.position, nodes=2, node_rank=world.rank, local_rank=0)
    try:
        check_shared(world, Path(folders[world.rank]))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_node_without_the_volume_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    one, other, file = (str(tmp_path / name) for name in ("one", "other", "file"))
    assert in_ranks(shares, tmp_path, 2, [one, one]) == ["", ""]
    assert list(Path(one).iterdir()) == []
    for folders, node in (([one, other], 1), ([file, one], 0), ([one, file], 1)):
        found = in_ranks(shares, tmp_path, 2, folders)
        assert all(f"node {node} cannot write to the run directory" in each for each in found), found


def test_a_whole_checkpoint_of_an_older_version_is_read(tmp_path: Path) -> None:
    def whole(trainer: Trainer, _: Any) -> str:
        trainer.begins()
        trainer.takes_step()
        state = trainer.full_state()
        if not trainer.world.is_first:
            return ""
        trainer.store.save(1, serialize({**state, "step": 1}), {})
        return digest(state)

    before = in_ranks(whole, tmp_path, 2)[0]
    assert in_ranks(saves, tmp_path, 3, 0)[0]["loaded"] == before
