"""Exact evaluation on all ranks: sums and counts, every sample once, no padding."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tandem.config.slices import DataConfig, EvaluationConfig
from tandem.data.kinds import begins_anew, evaluation_batches
from tandem.data.loader import batch_size_of
from tandem.distributed.group import ProcessGroup
from tandem.distributed.statistics import Statistics
from tandem.distributed.strategy import Strategy
from tandem.tasks.base import WholeTask
from tandem.tasks.mistakes import Outputs as Rows
from tandem.tasks.mistakes import Sums, check_batch, sums_and_outputs
from tandem.training.flops import buffers_kept
from tandem.training.gathered import Outputs
from tandem.training.precision import autocast

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
    statistics: Statistics | None = None

    def scores(self) -> dict[str, float]:
        """Means over the whole `dataset`, and what `evaluate_all` gives, by score name, equal on all ranks.

        Several sets: SET/NAME. Counts are exact and sums are in float64, so neither world size nor batch size
        shows beyond rounding. Rank 0's buffers go to all ranks first (or `statistics` says which count); the
        unwrapped module runs, since shares may differ.
        """
        if self.statistics is not None:
            with self.statistics.counting():
                return self._all_scores()
        self.world.broadcast_buffers(self.model)
        return self._all_scores()

    def rehearse(self) -> None:
        """Score a few samples and forget them: a mistake is seen before the first step, not an epoch later.

        All ranks call this. Nothing of the model is changed, and each step sets the random state anew. Data
        that can be read only once are left alone. Raises ConfigError, and what the task raises.
        """
        for _, each in self._sets():
            if begins_anew(each.dataset, self.world.rank, self.world.size):
                first = replace(each, batch_size=REHEARSED_SAMPLES, workers=0)
                outputs = first._outputs()
                with self._evaluating(), buffers_kept(self.model):
                    for batch, counts in first._passes():
                        _, rows = self._scores_of(batch)
                        if counts and rows:
                            outputs.add(rows)
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
            for batch, counts in self._passes():
                of_batch, rows = self._scores_of(batch)
                if counts and rows:
                    outputs.add(rows)
                for name, (total, count) in of_batch.items():
                    entry = sums.setdefault(name, [0.0, 0.0])
                    entry[0] += float(total) * counts
                    entry[1] += float(count) * counts
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

    def _passes(self) -> Iterator[tuple[Any, bool]]:
        """This rank's batches, and whether they count.

        Where a forward pass needs all ranks, each makes as many as the rank with the most batches, however
        the data are divided: before each pass they ask whether any has one left. Who has none runs its last
        batch again, or the first of all.
        """
        batches, spare = self._batches(self.world.rank, self.world.size), None
        if not self.strategy.shares_parameters:
            yield from ((batch, True) for batch in batches)
            return
        while self.world.sum([float((batch := next(batches, None)) is not None)])[0]:
            if batch is None and spare is None:
                spare = next(self._batches(0, 1))
            yield (spare, False) if batch is None else (batch, True)
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
