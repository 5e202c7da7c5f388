"""Numbers that a script logs: added up on the device, summed over ranks when a line of the log is due.

Ranks have to sum the same names. A rank that has met a new one says so in the step's exchange; at the next
line all of them exchange the names they know, so it takes no collective before there is something to settle.
"""

from typing import Any

from torch import Tensor

from tandem.distributed.group import ProcessGroup
from tandem.errors import ConfigError


class Numbers:
    """{name: (sum, count)} since the last line, of this rank."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._sums: dict[str, tuple[Any, int]] = {}
        self._settled: list[str] = []
        self.has_new = False
        self.everyone_settles = True
        """At the first line, and when some rank had a new name in a step that all ranks know of."""

    def add(self, name: str, value: Tensor | float) -> None:
        """Raises ConfigError for what is no single number. Never waits for the device."""
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ConfigError(
                    f"run.log({name}=...) got a tensor of shape {tuple(value.shape)}, valid is one number"
                )
            value = value.detach().float().reshape(())
            value = value if value.is_cuda else float(value)
        elif not isinstance(value, int | float):
            raise ConfigError(
                f"run.log({name}=...) got {type(value).__name__}, valid is a number or a tensor of one"
            )
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + value, count + 1)
        self.has_new = self.has_new or name not in self._settled

    def state(self) -> list[str]:
        """The settled names, for a checkpoint."""
        return self._settled

    def load(self, names: list[str]) -> None:
        self._settled, self.everyone_settles = list(names), not names

    def reduced(self) -> dict[str, tuple[float, float]]:
        """The sums and counts of all ranks, which begin anew. All ranks call this at the same step."""
        if self.everyone_settles:
            known = self._group.gather_json(sorted({*self._settled, *self._sums}))
            self._settled = sorted({name for names in known for name in names})
            self.has_new = self.everyone_settles = False
        if not self._settled:
            return {}
        mine = [self._sums.pop(name, (0.0, 0)) for name in self._settled]
        pairs = [(float(total), float(count)) for total, count in mine]
        finite = [pair if abs(pair[0]) < float("inf") else (0.0, 0.0) for pair in pairs]
        totals = self._group.sum([number for pair in finite for number in pair])
        return dict(zip(self._settled, zip(totals[::2], totals[1::2], strict=True), strict=True))
