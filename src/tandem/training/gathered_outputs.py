"""Gather evaluation outputs from all ranks, for scores that are no sums over samples: AUC, mAP, BLEU."""

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tandem.checkpoint.state import deserialize, serialize
from tandem.distributed.group import ProcessGroup
from tandem.errors import ConfigError, TandemError
from tandem.tasks.base import WholeTask
from tandem.tasks.mistakes import OUTPUTS, check_scores, line_of, mistake, where

log = logging.getLogger("tandem.run")

MISTAKES = (AttributeError, ImportError, NameError, TypeError)
"""Exceptions that show a bug in the code, however few samples it gets."""


class _Given(dict[str, Any]):
    """The argument of `evaluate_all`. A missing name is reported as an error at the method's line."""

    def __init__(self, outputs: Mapping[str, Any], task: WholeTask) -> None:
        super().__init__(outputs)
        self._task = task

    def __missing__(self, name: str) -> Any:
        location = line_of(self._task.evaluate_all)
        there = ", ".join(map(repr, self)) or "nothing"
        raise ConfigError(f"{location}evaluate_all asks for {name!r}, but evaluate_batch returns {there}")


class Outputs:
    """What `evaluate_batch` returns next to its sums, on the host: {name: one row per sample}.

    `strided`: rank r has samples r, r + ranks, ... of the set. Otherwise its rows follow those of rank r - 1.
    """

    def __init__(self, task: WholeTask, world: ProcessGroup, strided: bool) -> None:
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

        Raises ConfigError for rows that cannot be combined and for invalid scores, and what the task raises.
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

        All ranks call this, and raise alike. Some scores need more samples, or samples of both classes; what
        is raised for that reason is not an error.
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
        count = len(parts)  # ranks beyond the end of a small set have none
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
