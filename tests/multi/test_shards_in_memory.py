"""Each rank under fsdp keeps a snapshot of its shard: a killed rank costs at most one step, and no bit."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sharded_ranks import Trainer, in_ranks, killed_here

from needs import require_strategy
from tandem.checkpoint.node_memory import NodeMemory
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
        for target, source in zip(own._targets[own._slot][::2], sources[::2], strict=True):
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
    calm = in_ranks(trains, tmp_path, size, None, memories=[NodeMemory() for _ in range(2 * size)])
    chance = random.Random(size)
    memories = [NodeMemory() for _ in range(2 * size)]
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
    memories = [NodeMemory() for _ in range(4)]
    in_ranks(trains, tmp_path, 2, None, memories=memories)
    for lost in (
        [*memories[:3], NodeMemory()],  # the memory of rank 1's node is new
        [NodeMemory() for _ in range(6)],  # another number of ranks
        [*memories[:2], memories[3], memories[2]],  # the ranks have other nodes
    ):
        size = len(lost) // 2
        found = in_ranks(lambda trainer, _: trainer.begins().step, tmp_path, size, memories=lost)
        assert found == [0] * size


def test_a_step_that_only_one_rank_has_does_not_count(tmp_path: Path) -> None:
    memories = [NodeMemory() for _ in range(4)]

    def one_ahead(trainer: Trainer, _: Any) -> None:
        trainer.begins()
        for _step in range(3):
            trainer.takes_step()
            if trainer.step < 3 or trainer.world.rank == 1:
                trainer.saver.snapshot(trainer.step, has_lines=False)

    in_ranks(one_ahead, tmp_path, 2, memories=memories)
    ended = in_ranks(trains, tmp_path, 2, memories=memories)
    assert [each["first"] for each in ended] == [2, 2]


@pytest.mark.parametrize(
    ("parameters", "state", "every"), [(False, False, "1"), (True, True, "1"), (False, True, "never")]
)
def test_a_state_that_no_rank_can_keep_has_no_snapshots(parameters: bool, state: bool, every: str) -> None:
    """Errors that PowerSGD remembers are on all ranks, and in no shard."""
    strategy: Any = SimpleNamespace(shards_parameters=parameters, shards_state=state)
    world: Any = SimpleNamespace(device=torch.device("cpu"))
    grant: Any = SimpleNamespace(memories=[1, 2])
    assert snapshot_every("auto", world, grant, strategy) == every
