"""Collect facts about a task on one rank, which must be the same on all ranks and in every call.

`python -m tandem.verify.probe SETTINGS RANK RANKS MEETING` prints them as one line of JSON, for `check`. Each
rank is a separate interpreter, as on separate nodes, so results that depend on entropy, string hashes or the
rank differ.
"""

import json
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tandem.config import Settings
from tandem.data.fetch import WithStepContext
from tandem.data.kinds import can_be_read_again, training_data
from tandem.data.seeds import seed_micro_step, seed_model
from tandem.data.source import BatchReader
from tandem.distributed.group import CollectiveObserver, ProcessGroup
from tandem.distributed.position import Connection, Position
from tandem.tasks.base import TaskWithDefaults, load_task
from tandem.tasks.build import datasets_of, model_of, order_of
from tandem.tasks.mistakes import kind, line_of, loss_and_sums
from tandem.training.buffers import materialize
from tandem.verify.outcome import digest, flat

BATCHES = 2


class Fact(NamedTuple):
    """A fact: its `name`, its `location` in the code, and its digests at the first and second call."""

    name: str
    location: str
    first: str
    second: str


class ProbeResults(NamedTuple):
    """The facts of one rank. `unpicklable`: (place, what and why)."""

    facts: list[Fact]
    unpicklable: list[tuple[str, str]]
    task: str
    """Where the task's model is built, for findings without their own location."""


def facts_of(settings: Settings, position: Position, connection: Connection) -> ProbeResults:
    """Create everything twice and compute digests. Raises TandemError like training."""
    limit = settings.reliability.phase_timeout
    world = ProcessGroup.open(position, connection, torch.device("cpu"), limit)
    try:
        return _facts_in(world, settings)
    finally:
        world.close()


def _facts_in(world: ProcessGroup, settings: Settings) -> ProbeResults:
    run = settings.run
    config = settings.data
    made = load_task(run.task, run.task_fields, config.data_dir, config.download)
    task = TaskWithDefaults(made)
    # Do the same as in training: two downloads to one directory would collide.
    world.once_per_node(task.prepare)
    datasets = datasets_of(task, run.seed)
    # Read as rank 0 of 1 on every rank: each then reads whole batches, which must be equal.
    reader = BatchReader(config, run.seed, 0, 1, task.collate, world.device, world.gather)

    def batches() -> list[Any]:
        data = training_data(datasets.train, reader, run.steps, order_of(task, datasets.train))
        given: Iterator[list[Any]] = data.steps(0, min(BATCHES, data.order.steps_per_epoch))
        return list(given)

    def model() -> nn.Module:
        seed_model(run.seed)
        made = model_of(task, world.devices)
        materialize(task, made, datasets.train, world)
        return made

    facts = []
    # `of_rank` gives each rank other samples, and an iterator cannot be read twice.
    if not hasattr(datasets.train, "of_rank") and can_be_read_again(datasets.train, 0, 1):
        seen = [batches(), batches()]
        facts.append(_fact("samples", samples_at(made, task, datasets.train), lambda n: seen[n]))
    facts.append(_fact("first weights", line_of(task.build_model), lambda _: model().state_dict()))
    if facts[0].name == "samples":

        def loss(number: int) -> Any:
            # A new model for each call, because a forward pass changes buffers such as BatchNorm's.
            module = model().train()
            seed_micro_step(run.seed, 0, 0, 0)
            met: list[str] = []
            with CollectiveObserver(lambda name, shapes: met.append(name)):
                value, _ = loss_and_sums(task.loss, task.loss(module, seen[0][0][0]), trains=True)
            value.backward()  # type: ignore[no-untyped-call]
            found = [value.detach(), *(each.grad for each in module.parameters())]
            if not met:
                return found
            # Ranks differ before the collective.
            return [each if each is None else world.mean(each) for each in found]

        facts.append(_fact("loss and gradients", line_of(task.loss), loss))
    return ProbeResults(facts, unpicklable(task, datasets), line_of(task.build_model))


def _fact(name: str, location: str, make: Callable[[int], Any]) -> Fact:
    # A message has room for 12 digits, and 48 bits tell two results apart.
    return Fact(name, location, *(digest(flat(make(number)))[:12] for number in (0, 1)))


def unpicklable(task: TaskWithDefaults, datasets: Any) -> list[tuple[str, str]]:
    """Return (place, what and why) for each part that cannot be sent to another process."""
    parts = {"the training set": datasets.train, "the evaluation set": datasets.evaluation}
    collate = task.collate.method if isinstance(task.collate, WithStepContext) else task.collate
    found = []
    for name, part in {**parts, "collate": collate}.items():
        try:
            pickle.dumps(part)
        except Exception as error:  # pickle raises whatever a part's own __reduce__ raises
            location = line_of(task.collate if name == "collate" and task.collate else task.build_datasets)
            found.append((location, f"{name}, {kind(part)}, cannot be pickled: {error}"))
    return found


def samples_at(made: object, task: TaskWithDefaults, dataset: Any) -> str:
    """Return where samples are created: the dataset's own method if it is in the task's module."""
    for name in ("__getitems__", "__getitem__", "__iter__"):
        method = getattr(type(dataset), name, None)
        if method is not None and type(dataset).__module__ == type(made).__module__:
            return line_of(method)
    return line_of(task.build_datasets)


if __name__ == "__main__":
    settings_text, rank, ranks, meeting = sys.argv[1:]
    position = Position(
        int(rank), int(rank), int(ranks), local_world_size=int(ranks), ranks_on_host=int(ranks)
    )
    settings = Settings.from_dict(json.loads(Path(settings_text).read_text()))
    told = facts_of(settings, position, Connection(init=meeting))
    print(json.dumps(told), flush=True)
