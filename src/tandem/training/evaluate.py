"""Evaluate exactly on all ranks, with sums and counts: every sample once, without padding."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem.checkpoint.state import deserialize, serialize
from tandem.config.slices import DataConfig, EvaluationConfig
from tandem.data.fetch import is_stream
from tandem.data.kinds import can_be_read_again, evaluation_batches
from tandem.data.loader import batch_size_of, joint_batches
from tandem.distributed.group import CollectiveObserver, ProcessGroup
from tandem.distributed.strategy import Strategy
from tandem.errors import ConfigError, TandemError
from tandem.tasks.base import TaskWithDefaults
from tandem.tasks.mistakes import (
    OUTPUTS,
    Sums,
    check_batch,
    check_scores,
    kind,
    line_of,
    mistake,
    sums_and_outputs,
    where,
)
from tandem.tasks.mistakes import Outputs as Rows
from tandem.training.buffers import buffers_kept
from tandem.training.precision import autocast

# Gather evaluation outputs from all ranks, for scores that are not sums over samples: AUC, mAP, BLEU.

log = logging.getLogger("tandem.run")

MISTAKES = (AttributeError, ImportError, NameError, TypeError)
"""Exceptions that show a bug in the code, however few samples it gets."""


class _Given(dict[str, Any]):
    """The argument of `evaluate_all`. A missing name is reported as an error at the method's line."""

    def __init__(self, outputs: Mapping[str, Any], task: TaskWithDefaults) -> None:
        super().__init__(outputs)
        self._task = task

    def __missing__(self, name: str) -> Any:
        location = line_of(self._task.evaluate_all)
        there = ", ".join(map(repr, self)) or "nothing"
        raise ConfigError(f"{location}evaluate_all asks for {name!r}, but evaluate_batch returns {there}")


class Outputs:
    """The outputs that `evaluate_batch` returns with its sums, on the host: {name: one row per sample}.

    `strided`: rank r has samples r, r + ranks, ... of the set. Otherwise its rows follow those of rank r - 1.
    """

    def __init__(self, task: TaskWithDefaults, world: ProcessGroup, strided: bool) -> None:
        self._task = task
        self._world = world
        self._strided = strided
        self._batches: list[Mapping[str, Any]] = []

    def add(self, outputs: Mapping[str, Any]) -> None:
        """Add the outputs of one batch, whose form has been checked."""
        if outputs:
            # The outputs of a whole set may not fit on a GPU next to the model.
            self._batches.append({
            name: rows.detach().cpu() if isinstance(rows, Tensor) else list(rows)
            for name, rows in outputs.items()
        })  # fmt: skip

    def scores(self) -> dict[str, float]:
        """Call `evaluate_all` on rank 0, and return its scores on all ranks. All ranks call this.

        Raises ConfigError for rows that cannot be combined and for invalid scores, and errors of the task.
        """
        parts = self._gathered()
        found = None
        problem = None
        if self._world.is_first:
            try:
                found = self._scored([deserialize(part) for part in parts])
            except Exception as error:  # the other ranks wait for the broadcast
                problem = error
        scores = self._world.broadcast_json(found)
        if problem is not None:
            raise problem
        if scores is None:
            raise TandemError("evaluate_all failed on rank 0; see the log of rank 0")
        return dict(scores)

    def dry_run(self) -> None:
        """Call `evaluate_all` with a few samples and discard the result.

        All ranks call this and raise the same error. Some scores need more samples, or samples of both
        classes; exceptions for that reason are ignored.
        """
        parts = self._gathered()
        problem = ""
        method = self._task.evaluate_all
        if self._world.is_first:
            try:
                self._scored([deserialize(part) for part in parts])
            except ConfigError as error:
                problem = str(error)
            except MISTAKES as error:
                problem = f"{line_of(method)}evaluate_all fails: {where(error)}; {OUTPUTS}"
            except Exception as error:  # AUC of one class, division by zero
                log.info(
                    "a test of evaluate_all failed, maybe because it used only a few samples: %s",
                    where(error),
                )
        if problem := str(self._world.broadcast_json(problem)):
            raise ConfigError(problem)

    def _gathered(self) -> list[bytes]:
        """Return each rank's rows, on rank 0."""
        names = list(dict.fromkeys(chain.from_iterable(self._batches)))
        own_outputs = {name: self._joined([batch[name] for batch in self._batches], name) for name in names}
        return self._world.gather_bytes(serialize(own_outputs))

    def _scored(self, ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        names = dict.fromkeys(chain.from_iterable(ranks))
        whole = {name: self._whole([rank[name] for rank in ranks if name in rank], name) for name in names}
        scores: Any = self._task.evaluate_all(_Given(whole, self._task))
        check_scores(self._task.evaluate_all, scores)
        return {str(name): float(value) for name, value in scores.items()}

    def _whole(self, parts: Sequence[Any], name: str) -> Any:
        """Return all ranks' rows in the order of the set."""
        whole = self._joined(parts, name)
        if not self._strided:
            return whole
        count = len(parts)  # ranks beyond the end of a small set have no rows
        indices = [index for rank in range(count) for index in range(rank, len(whole), count)]
        if isinstance(whole, Tensor):
            ordered = torch.empty_like(whole)
            ordered[torch.tensor(indices)] = whole
            return ordered
        rows: list[Any] = [None] * len(whole)
        for index, row in zip(indices, whole, strict=True):
            rows[index] = row
        return rows

    def _joined(self, parts: Sequence[Any], name: str) -> Any:
        if not isinstance(parts[0], Tensor):
            return list(chain.from_iterable(parts))
        try:
            return torch.cat(list(parts))
        except RuntimeError as error:
            shapes = ", ".join(sorted({str(tuple(part.shape[1:])) for part in parts}))
            got = f"rows of different shapes ({shapes}) for {name!r}"
            raise mistake(
                self._task.evaluate_batch, got, f"return a list, or rows of one shape; {OUTPUTS}"
            ) from error


class _CollectiveMet(BaseException):
    """Raised before a task's method calls a collective.

    Not an Exception, so that a task's own `except Exception` cannot hide it.
    """


class _Scored(NamedTuple):
    """The result of one pass, and whether its sums count."""

    sums: Sums
    rows: Rows
    counts: bool = True


REHEARSED_SAMPLES = 2
"""Samples per rank: enough to check how a task handles a batch, without a long wait for slow data."""


def evaluation_batch_size(config: EvaluationConfig, data: DataConfig, world: ProcessGroup) -> int:
    """Return the samples per rank and evaluation pass: the setting, or the number in a training pass."""
    share = -(-data.batch_size // world.size)
    # A training pass needs more memory, so an evaluation fits as many samples.
    return config.eval_batch_size or min(data.micro_batch_size or share, share)


@dataclass(frozen=True)
class Evaluation:
    """Evaluate a model on a dataset, or on several by name.

    `batch_size` is per rank and pass; `precision` is the training's.
    """

    world: ProcessGroup
    strategy: Strategy
    task: TaskWithDefaults
    model: nn.Module
    dataset: Any
    batch_size: int
    precision: str = "fp32"
    workers: int = 0
    exchanges: dict[str, bool] = field(default_factory=dict)
    """Whether a scoring method calls collectives, by its name. Known answers are saved in checkpoints."""

    def scores(self) -> dict[str, float]:
        """Return means over the whole `dataset`, and the results of `evaluate_all`, by score name.

        All ranks return the same scores. With several sets, names are SET/NAME. Counts are exact and sums are
        in float64, so world size and batch size only affect rounding. Rank 0's buffers are broadcast first.
        The unwrapped module runs, because ranks may have different numbers of batches.
        """
        self.world.broadcast_buffers(self.model)
        return {begin + name: score for begin, each in self._sets() for name, score in each._scores().items()}

    def dry_run(self) -> None:
        """Score a few samples and discard the result, so that an error shows before the first step.

        All ranks call this. It does not change the model, and each step sets the random state itself. Data
        that can be read only once is skipped. Raises ConfigError, and errors of the task.
        """
        self.exchanges.clear()  # they may come from a checkpoint, and the task may have changed
        for _, each in self._sets():
            if can_be_read_again(each.dataset, self.world.rank, self.world.size):
                # Loader processes take longer to start than a few samples to load.
                first = replace(each, batch_size=REHEARSED_SAMPLES, workers=0)
                outputs = first._outputs()
                with self._evaluating(), buffers_kept(self.model):
                    for made in first._scored():
                        outputs.add(made.rows)
                        break
                if self._gathers:
                    outputs.dry_run()

    def _sets(self) -> list[tuple[str, "Evaluation"]]:
        """Return (prefix of its score names, evaluation of this set) for each set."""
        if not isinstance(self.dataset, Mapping):
            return [("", self)]
        return [(f"{name}/", replace(self, dataset=dataset)) for name, dataset in self.dataset.items()]

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
        # A rank without a batch does not know the names, and all ranks must sum in the same order.
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
        """Yield the results of this rank's passes.

        If the scoring method calls collectives, all ranks need passes with equal numbers of samples. The
        first pass shows whether it does: it is stopped before the first collective and repeated.
        """
        batches = self._batches(self.world.rank, self.world.size)
        if self.world.size == 1:
            yield from (_Scored(*self._scores_of(batch)) for batch in batches)
        # A forward pass gathers sharded parameters, so all ranks need the same number of passes.
        elif self.strategy.shards_parameters:
            yield from self._scored_in_step() if self._is_of_any_length else self._scored_together()
        else:
            name = self._scoring.__name__
            if name not in self.exchanges:
                made, stopped = self._first_scored(next(batches, None))
                # A rank without a batch does not know, so any rank's answer counts for all.
                self.exchanges[name] = self.world.sum([float(stopped)])[0] > 0
                if not self.exchanges[name]:
                    yield from made
            if self.exchanges[name]:
                # This starts over, so the result of a first pass that was not stopped is dropped.
                yield from self._scored_together()
            else:
                yield from (_Scored(*self._scores_of(batch)) for batch in batches)

    def _first_scored(self, batch: Any) -> tuple[list["_Scored"], bool]:
        """Return the result of the first pass, and whether it was stopped before a collective."""
        try:
            with CollectiveObserver(_stop):
                return ([] if batch is None else [_Scored(*self._scores_of(batch))]), False
        except _CollectiveMet:
            return [], True

    @property
    def _is_of_any_length(self) -> bool:
        return hasattr(self.dataset, "of_rank") or is_stream(self.dataset)

    def _scored_together(self) -> Iterator["_Scored"]:
        """Yield passes with equal numbers of samples on all ranks.

        All ranks score the remaining samples, and each of these counts once. Raises ConfigError for data with
        unknown lengths.
        """
        if self._is_of_any_length:
            method = self._scoring
            raise ConfigError(
                f"{line_of(method)}{method.__name__} calls collectives, but ranks may get different numbers "
                f"of samples from {kind(self.dataset)}; evaluate on a dataset with __len__ and __getitem__, "
                "or without collectives"
            )
        rank = self.world.rank
        size = self.world.size
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
            else:  # when ranks divide the set, a row counts on the rank that has it
                own_positions = [position for position, index in enumerate(shared) if index % size == rank]
                kept = (
                    {name: each[own_positions[0] : own_positions[0] + 1] for name, each in rows.items()}
                    if own_positions
                    else {}
                )
                yield _Scored(sums, kept, counts=rank == 0)

    def _scored_in_step(self) -> Iterator["_Scored"]:
        """Yield as many passes on each rank as the rank with the most batches needs.

        Before each pass, ranks ask each other whether any has a batch left. A rank without one repeats its
        last batch, or the first batch of the set if it had none.
        """
        batches = self._batches(self.world.rank, self.world.size)
        spare = None
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
        """Return {name: (sum, count)} of one batch, and the rows to gather, one per sample."""
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
        """The task's method that returns the scores."""
        return self.task.evaluate_batch if "evaluate_batch" in self.task.own else self.task.loss


def _stop(name: str, shapes: list[list[int]]) -> None:
    raise _CollectiveMet(name)
