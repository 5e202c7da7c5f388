"""Ranks with 100, 60 and 0 batches of their own end together: each sample once, the gradient of the mean."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_strategies import Blocks, Classes, in_processes
from torch import Tensor

from program_files import program_text
from tandem.config import Settings
from tandem.data.kinds import evaluation_batches, training_data
from tandem.data.source import BatchReader
from tandem.distributed import strategy as strategies
from tandem.distributed.group import ProcessGroup
from tandem.errors import ConfigError
from tandem.tasks.base import TaskWithDefaults
from tandem.telemetry.clock import Clock
from tandem.telemetry.meter import Costs
from tandem.training.step import Proposal, TrainStep

pytestmark = pytest.mark.multi

SHARE = 2
SIZES = (100 * SHARE - 1, 60 * SHARE, 0)  # the last batch of the longest part is half a batch
INPUTS = torch.randn(sum(SIZES), 6, generator=torch.Generator().manual_seed(3))


def sample(index: int) -> tuple[Tensor, Tensor, int]:
    return INPUTS[index], (INPUTS[index, 0] > 0).long(), index


class Parts:
    """A generator for each rank; nobody knows its length before it has been read."""

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        self.sizes = sizes

    def of_rank(self, rank: int, world_size: int) -> Iterator[Any]:
        first = sum(self.sizes[:rank])
        return (sample(index) for index in range(first, first + self.sizes[rank]))


class Numbered(Classes):
    """A batch has the numbers of its samples beside them."""

    def loss(self, model: Any, batch: Any) -> Any:
        return super().loss(model, batch[:2])


def stepper_of(group: ProcessGroup, name: str) -> tuple[TrainStep, Any]:
    settings = Settings().replace(batch_size=SHARE * 3)
    torch.manual_seed(1)
    strategy = strategies.load(name, group)
    model = strategy.shard(Blocks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    task: Any = TaskWithDefaults(Numbered())  # type: ignore[arg-type]
    made = settings.compute, settings.optimization, SHARE * 3, 0, task, model, optimizer
    return TrainStep(group, strategy, *made, Clock()), model


def reader_of(group: ProcessGroup, micro: int | None = None) -> BatchReader:
    config = Settings().replace(batch_size=SHARE * 3, micro_batch_size=micro).data
    return BatchReader(config, 0, group.rank, group.size, None, group.device, group.gather)


def uneven(group: ProcessGroup, name: str, folder: Path) -> dict[str, Any]:
    """An epoch and a half; then the end of it once more, from the middle."""
    found: dict[str, Any] = {}
    for micro in (None, 1):
        data = training_data(Parts(), reader_of(group, micro), None)
        train_step, model = stepper_of(group, name)
        train_step.samples_of = data.order.samples
        losses, seen, stop = [], [], data.order.steps_per_epoch
        for step, batches in enumerate(data.steps(0, stop)):
            if step == 0:
                train_step.take_dry_step(batches, 0, Costs())
            agreed = train_step.take(batches, step, Proposal())
            assert agreed is not None
            losses.append(agreed.loss)
            seen += [int(index) for batch in batches if batch is not None for index in batch[2]]
        again = [batch for batches in data.steps(57, stop) for batch in batches]
        rest = [int(index) for batch in again if batch is not None for index in batch[2]]
        counts = [data.order.samples(step) for step in range(stop)], data.order.samples_before(stop + 50)
        found[str(micro)] = losses, seen, rest, counts, model.state_dict()
    with pytest.raises(ConfigError, match="returns 199, 120, 0"):
        data.load({"sizes": [199, 120]})
    scored = evaluation_batches(Parts(), group.rank, group.size, 7, device=group.device)
    found["scored"] = [int(index) for batch in scored for index in batch[2]]
    return found


def alone(group: ProcessGroup, name: str, folder: Path) -> Any:
    """What one process makes of the same samples in the same steps."""
    train_step, model = stepper_of(group, name)
    parts = [list(range(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))) for rank in range(3)]
    losses, counts = [], [0]
    train_step.samples_of = lambda step: counts[-1]
    for step in range(100):
        indices = [index for part in parts for index in part[step * SHARE : (step + 1) * SHARE]]
        batch = torch.utils.data.default_collate([sample(index) for index in indices])
        counts.append(len(indices))
        if step == 0:
            train_step.take_dry_step([batch], 0, Costs())
        agreed = train_step.take([batch], step, Proposal())
        assert agreed is not None
        losses.append(agreed.loss)
    return losses, model.state_dict()


@pytest.mark.core
def test_ranks_end_together_with_the_gradients_of_one_process(tmp_path: Path, free_port: int) -> None:
    (losses, weights), *_ = in_processes("single", 1, free_port, alone, tmp_path)
    ranks = in_processes("ddp", 3, free_port, uneven, tmp_path)
    for micro in ("None", "1"):
        everything = [index for rank in ranks for index in rank[micro][1]]
        assert sorted(everything) == list(range(sum(SIZES)))
        for number, rank in enumerate(ranks):
            mine, seen, rest, (samples, before), state = rank[micro]
            assert len(seen) == SIZES[number] and rest == seen[57 * SHARE :]
            assert mine == ranks[0][micro][0]
            assert mine[:20] == pytest.approx(losses[:20], rel=2e-6, abs=1e-6)  # after as many exact updates
            assert mine == pytest.approx(losses, abs=1e-4)  # where rounding has grown by momentum
            assert samples == [4] * 60 + [2] * 39 + [1] and before == sum(SIZES) + 200
            for name, value in weights.items():
                torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4)
    assert sorted(index for rank in ranks for index in rank["scored"]) == list(range(sum(SIZES)))


def test_what_cannot_be_is_said_in_one_line() -> None:
    for sizes, batch, said in (((0, 0), 4, "no samples for any rank"), ((5, 3, 2), 4, "over 3 ranks")):
        config = Settings().replace(batch_size=batch).data
        gathered = list(sizes)
        reader = BatchReader(
            config, 0, 0, len(sizes), None, torch.device("cpu"), lambda size, all=gathered: all
        )  # type: ignore[misc]
        with pytest.raises(ConfigError, match=said):
            training_data(Parts(sizes), reader, None)
    with pytest.raises(ConfigError, match="works only in tasks"):
        training_data(Parts((5,)), BatchReader(config, 0, 0, 1, None, torch.device("cpu")), None)


TASK = program_text("uneven_task")


def test_a_run_of_uneven_parts_ends_and_resumes_bit_for_bit(processes: Any, tmp_path: Path) -> None:
    (tmp_path / "line.py").write_text(TASK)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}

    def run(folder: str, *flags: object) -> dict[str, Any]:
        words = ["launch", "--task", "line.py:Line", "--batch-size", 8, "--lr", 0.01]
        words += ["--schedule", "constant", "--nproc", 2]
        words += ["--device", "cpu", "--threads", 1, "--metrics", 0, "--metrics-linger", 0]
        command = [sys.executable, "-m", "tandem", *map(str, (*words, "--run-dir", folder, *flags))]
        code, output = processes.run(command, cwd=tmp_path, env=clean)
        assert code == 0, output
        return dict(json.loads((tmp_path / folder / "summary.json").read_text()))

    calm = run("calm", "--epochs", 2)
    assert calm["global_step"] == 22 and calm["samples_seen"] == 108 and calm["epoch"] == 2
    assert calm["eval"]["error"] == pytest.approx(calm["eval"]["loss"])
    run("resumed", "--steps", 17)
    assert run("resumed", "--steps", 22)["weights_sha256"] == calm["weights_sha256"]
