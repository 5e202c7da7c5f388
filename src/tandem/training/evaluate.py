"""Exact evaluation on all ranks: sums and counts, every sample once, no padding."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from tandem.config.slices import DataConfig, EvaluationConfig
from tandem.data.fetch import is_stream
from tandem.data.kinds import begins_anew, evaluation_batches
from tandem.data.loader import batch_size_of, joint_batches
from tandem.distributed.group import ProcessGroup
from tandem.distributed.strategy import Strategy
from tandem.distributed.watching import Watching
from tandem.errors import ConfigError
from tandem.tasks.base import WholeTask
from tandem.tasks.mistakes import Outputs as Rows
from tandem.tasks.mistakes import Sums, check_batch, kind, line_of, sums_and_outputs
from tandem.training.buffers import buffers_kept
from tandem.training.gathered import Outputs
from tandem.training.precision import autocast


class _CollectiveMet(BaseException):
    """A task's method is about to call a collective; no `except Exception` of its own shall hide it."""


class _Scored(NamedTuple):
    """What a pass gave, and whether its sums count."""

    sums: Sums
    rows: Rows
    counts: bool = True


REHEARSED_SAMPLES = 2
"""Of each rank: enough to see what a task makes of a batch, and no wait for data that are slow to read."""


def evaluation_batch_size(config: EvaluationConfig, data: DataConfig, world: ProcessGroup) -> int:
    """Samples per rank and evaluation pass: what is set, else as many as in a training pass."""
    share = -(-data.batch_size // world.size)
    return config.eval_batch_size or min(data.micro_batch_size or share, share)


@dataclass(frozen=True)
class Evaluation:
    """`batch_size` is per rank and pass; `precision` that of the training.

    `dataset`: what to evaluate on, or several such by name.
    """

    world: ProcessGroup
    strategy: Strategy
    task: WholeTask
    model: nn.Module
    dataset: Any
    batch_size: int
    precision: str = "fp32"
    workers: int = 0
    exchanges: dict[str, bool] = field(default_factory=dict)
    """Whether the scoring method calls collectives, by the name of it; what is known is saved."""

    def scores(self) -> dict[str, float]:
        """Means over the whole `dataset`, and what `evaluate_all` gives, by score name, equal on all ranks.

        Several sets: SET/NAME. Counts are exact and sums are in float64, so neither world size nor batch size
        shows beyond rounding. Rank 0's buffers go to all ranks first; the unwrapped module runs,
        since shares may differ.
        """
        self.world.broadcast_buffers(self.model)
        return self._all_scores()

    def rehearse(self) -> None:
        """Score a few samples and forget them: a mistake is seen before the first step, not an epoch later.

        All ranks call this. Nothing of the model is changed, and each step sets the random state anew. Data
        that can be read only once are left alone. Raises ConfigError, and what the task raises.
        """
        self.exchanges.clear()  # of a checkpoint, and the task may be another since
        for _, each in self._sets():
            if begins_anew(each.dataset, self.world.rank, self.world.size):
                first = replace(each, batch_size=REHEARSED_SAMPLES, workers=0)
                outputs = first._outputs()
                with self._evaluating(), buffers_kept(self.model):
                    for made in first._scored():
                        outputs.add(made.rows)
                        break
                if self._gathers:
                    outputs.rehearse()

    def _sets(self) -> list[tuple[str, "Evaluation"]]:
        """(what its scores' names begin with, an evaluation of this set)."""
        if not isinstance(self.dataset, Mapping):
            return [("", self)]
        return [(f"{name}/", replace(self, dataset=dataset)) for name, dataset in self.dataset.items()]

    def _all_scores(self) -> dict[str, float]:
        return {begin + name: score for begin, each in self._sets() for name, score in each._scores().items()}

    def _scores(self) -> dict[str, float]:
        sums: dict[str, list[float]] = {}
        outputs = self._outputs()
        with self._evaluating():
            for made in self._scored():
                outputs.add(made.rows)
                for name, (total, count) in made.sums.items():
                    entry = sums.setdefault(name, [0.0, 0.0])
                    entry[0] += float(total) * made.counts
                    entry[1] += float(count) * made.counts
        names = sorted({str(name) for part in self.world.gather_json(sorted(sums)) for name in part})
        reduced = self.world.sum([value for name in names for value in sums.get(name, [0.0, 0.0])])
        pairs = zip(names, reduced[::2], reduced[1::2], strict=True)
        means = {name: total / count for name, total, count in pairs if count > 0}
        return means | outputs.scores() if self._gathers else means

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(was_training)

    def _scored(self) -> Iterator["_Scored"]:
        """What this rank's passes give.

        A method that calls collectives needs passes of all ranks with equal numbers of samples. Whether it
        does shows in the first pass, which is stopped before the first collective and made again.
        """
        batches = self._batches(self.world.rank, self.world.size)
        if self.world.size == 1:
            yield from (_Scored(*self._scores_of(batch)) for batch in batches)
        elif self.strategy.shares_parameters:
            yield from self._scored_in_step() if self._is_of_any_length else self._scored_together()
        else:
            name = self._scoring.__name__
            if name not in self.exchanges:
                made, stopped = self._first_scored(next(batches, None))
                self.exchanges[name] = self.world.sum([float(stopped)])[0] > 0
                if not self.exchanges[name]:
                    yield from made
            if self.exchanges[name]:
                yield from self._scored_together()
            else:
                yield from (_Scored(*self._scores_of(batch)) for batch in batches)

    def _first_scored(self, batch: Any) -> tuple[list["_Scored"], bool]:
        """What the first pass gives, and whether it was stopped before a collective."""
        try:
            with Watching(_stop):
                return ([] if batch is None else [_Scored(*self._scores_of(batch))]), False
        except _CollectiveMet:
            return [], True

    @property
    def _is_of_any_length(self) -> bool:
        return hasattr(self.dataset, "of_rank") or is_stream(self.dataset)

    def _scored_together(self) -> Iterator["_Scored"]:
        """Equal numbers of samples in each pass. What is left over all ranks score, and each once counts."""
        if self._is_of_any_length:
            method = self._scoring
            raise ConfigError(
                f"{line_of(method)}{method.__name__} calls collectives, but ranks may get different numbers "
                f"of samples from {kind(self.dataset)}; evaluate on a dataset with __len__ and __getitem__, "
                "or without collectives"
            )
        rank, size = self.world.rank, self.world.size
        for batch, shared in joint_batches(
            self.dataset,
            rank,
            size,
            self.batch_size,
            workers=self.workers,
            collate=self.task.collate,
            device=self.world.device,
        ):
            sums, rows = self._scores_of(batch)
            if shared is None:
                yield _Scored(sums, rows)
            else:  # a row goes to the rank that has it where ranks divide the set
                mine = [place for place, index in enumerate(shared) if index % size == rank]
                kept = {name: each[mine[0] : mine[0] + 1] for name, each in rows.items()} if mine else {}
                yield _Scored(sums, kept, counts=rank == 0)

    def _scored_in_step(self) -> Iterator["_Scored"]:
        """As many passes on each rank as on the rank with the most batches, however the data are divided.

        Before each pass they ask whether any has one left. Who has none runs its last batch again, or the
        first of all.
        """
        batches, spare = self._batches(self.world.rank, self.world.size), None
        while self.world.sum([float((batch := next(batches, None)) is not None)])[0]:
            if batch is None and spare is None:
                spare = next(self._batches(0, 1))
            sums, rows = self._scores_of(spare if batch is None else batch)
            yield _Scored(sums, {}, False) if batch is None else _Scored(sums, rows)
            spare = spare if batch is None else batch

    def _batches(self, rank: int, size: int) -> Iterator[Any]:
        return evaluation_batches(
            self.dataset,
            rank,
            size,
            self.batch_size,
            workers=self.workers,
            collate=self.task.collate,
            device=self.world.device,
        )

    def _scores_of(self, batch: Any) -> tuple[Sums, Rows]:
        """{name: (sum, count)} of one batch, and a row for each sample of what is to be gathered."""
        check_batch(self.task.collate, self.task.build_datasets, batch)
        with autocast(self.world.device, self.precision):
            made = self.task.evaluate_batch(self.model, batch)
        return sums_and_outputs(self._scoring, made, batch_size_of(batch), self._gathers)

    def _outputs(self) -> Outputs:
        return Outputs(self.task, self.world, strided=not hasattr(self.dataset, "of_rank"))

    @property
    def _gathers(self) -> bool:
        return "evaluate_all" in self.task.own

    @property
    def _scoring(self) -> Callable[..., Any]:
        """The method of the task that gives the scores."""
        return self.task.evaluate_batch if "evaluate_batch" in self.task.own else self.task.loss


def _stop(name: str, shapes: list[list[int]]) -> None:
    raise _CollectiveMet(name)
