"""Each rank under fsdp keeps a snapshot of its shard: a killed rank costs at most one step, and no bit."""

import errno
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sharded_ranks import Trainer, in_ranks, killed_here, memories_of

from needs import require_strategy
from tandem.checkpoint.node_memory import NodeMemory
from tandem.distributed.position import REGIONS
from tandem.schedule import Cadence
from tandem.training.saving import snapshot_every

pytestmark = [pytest.mark.multi, pytest.mark.timeout(180)]
STEPS = 12


@pytest.fixture(autouse=True)
def _has_fsdp() -> None:
    require_strategy("fsdp")


def trains(trainer: Trainer, dies: tuple[int, int, str] | None) -> dict[str, Any]:
    """Train to the end; with `dies`, the rank is killed at that step, where the third value says."""
    found = trainer.begins()
    rank, last, where = dies or (-1, 0, "")
    own = trainer.saver._own
    assert own is not None

    def half(sources: list[Any]) -> None:
        for target, source in zip(own._targets[own.slot][::2], sources[::2], strict=True):
            target.copy_(source)
        killed_here()

    while trainer.step < STEPS:
        if (trainer.world.rank, trainer.step + 1, where) == (rank, last, "before the step"):
            killed_here()
        trainer.takes_step()
        if (trainer.world.rank, trainer.step, where) == (rank, last, "in the snapshot"):
            own._copy = half  # type: ignore[method-assign]
        trainer.saver.snapshot(trainer.step, has_lines=False)
    return {"first": found.step, "source": found.source, "weights": trainer.weights()}


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_costs_one_step_and_no_bit(tmp_path: Path, size: int) -> None:
    calm = in_ranks(trains, tmp_path, size, None, memories=memories_of(size))
    chance = random.Random(size)
    memories = memories_of(size)
    step = 0
    for where in ("in the snapshot", "before the step"):
        rank = chance.randrange(size)
        step = chance.randrange(step + 2, step + 5)
        in_ranks(trains, tmp_path, size, (rank, step, where), memories=memories, killed=[rank])
    ended = in_ranks(trains, tmp_path, size, None, memories=memories)
    # The step before which a rank is killed was not taken; that of the half-written snapshot is repeated.
    assert {each["first"] for each in ended} == {step - 1}
    assert {each["source"] for each in ended} == {"memory of this node"}
    assert ended[0]["weights"] == calm[0]["weights"]


def test_a_shard_that_is_missing_makes_the_checkpoint_count(tmp_path: Path) -> None:
    memories = memories_of(2)
    in_ranks(trains, tmp_path, 2, None, memories=memories)
    for lost in (
        [*memories[:3], NodeMemory(), *memories[4:]],  # the memory of rank 1's node is new
        memories_of(3),  # another number of ranks
    ):
        size = len(lost) // REGIONS
        found = in_ranks(lambda trainer, _: trainer.begins().step, tmp_path, size, memories=lost)
        assert found == [0] * size


def test_ranks_that_have_changed_places_give_each_other_their_shards(tmp_path: Path) -> None:
    memories = memories_of(2)
    calm = in_ranks(trains, tmp_path, 2, None, memories=memories)
    shared, first, second, copies = memories[:2], memories[2], memories[3], memories[4:]
    ended = in_ranks(trains, tmp_path, 2, None, memories=[*shared, second, first, *copies])
    assert {each["first"] for each in ended} == {STEPS}
    assert {each["source"] for each in ended} == {"memory of node 0"}
    assert ended[0]["weights"] == calm[0]["weights"]


def test_a_step_that_only_one_rank_has_does_not_count(tmp_path: Path) -> None:
    memories = memories_of(2)

    def one_ahead(trainer: Trainer, _: Any) -> None:
        trainer.begins()
        for _step in range(3):
            trainer.takes_step()
            if trainer.step < 3 or trainer.world.rank == 1:
                trainer.saver.snapshot(trainer.step, has_lines=False)

    in_ranks(one_ahead, tmp_path, 2, memories=memories)
    ended = in_ranks(trains, tmp_path, 2, memories=memories)
    assert [each["first"] for each in ended] == [2, 2]


@pytest.mark.parametrize("name", ["fsdp", "ddp"])
def test_every_copy_but_the_first_is_measured(tmp_path: Path, name: str) -> None:
    """The first one allocates memory, as does one of a state that has grown."""

    def copies(trainer: Trainer, _: Any) -> list[tuple[int, float]]:
        trainer.begins()
        found = list[tuple[int, float]]()
        trainer.saver.on_copied = lambda size, seconds: found.append((size, seconds))
        for step in range(6):
            trainer.takes_step()
            if step == 3:
                trainer.optimizer.state[next(trainer.model.parameters())]["more"] = torch.zeros(5000)
            trainer.saver.snapshot(trainer.step, has_lines=False)
        return found

    for measured in in_ranks(copies, tmp_path, 2, name=name, memories=memories_of(2)):
        assert len(measured) == 4 and all(seconds > 0 for _, seconds in measured)
        sizes = [size for size, _ in measured]
        assert sizes[0] == sizes[1] > 0 and sizes[2] == sizes[3] > sizes[0]


@pytest.mark.parametrize("name", ["fsdp", "ddp"])
def test_a_rank_without_memory_reports_that_it_cannot_measure(tmp_path: Path, name: str) -> None:
    def copies(trainer: Trainer, _: Any) -> list[tuple[int, float]]:
        trainer.begins()
        found = list[tuple[int, float]]()
        trainer.saver.on_copied = lambda size, seconds: found.append((size, seconds))

        def refuses(*_: Any) -> None:
            raise OSError(errno.ENOMEM, "no memory is left")

        for each in (trainer.saver._snapshots, trainer.saver._own):
            if each is not None:
                each._check_room = refuses  # type: ignore[method-assign]
        for _step in range(2):
            trainer.takes_step()
            trainer.saver.snapshot(trainer.step, has_lines=False)
        return found

    memories = memories_of(2)
    assert in_ranks(copies, tmp_path, 2, name=name, memories=memories) == [[(sys.maxsize, math.inf)]] * 2


EVERY_STEP = Cadence(0.0, "seconds")
NEVER = Cadence(0.0, "never")


@pytest.mark.parametrize(
    ("parameters", "state", "every"),
    [(False, False, EVERY_STEP), (True, True, EVERY_STEP), (False, True, NEVER)],
)
def test_a_state_that_no_rank_can_keep_has_no_snapshots(
    parameters: bool, state: bool, every: Cadence
) -> None:
    """Errors that PowerSGD remembers are on all ranks, and in no shard."""
    strategy: Any = SimpleNamespace(shards_parameters=parameters, shards_state=state)
    world: Any = SimpleNamespace(device=torch.device("cpu"))
    grant: Any = SimpleNamespace(memories=[1, 2])
    assert snapshot_every("auto", world, grant, strategy) == every
