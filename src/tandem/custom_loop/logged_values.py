"""Collect the numbers that a script logs: summed on the device, and over ranks when a log line is due.

Ranks must sum the same names. A rank with a new name reports that in the step's exchange, and at the next
line all ranks exchange their names. No collective is needed until there is something to settle.
"""

from typing import Any

import numpy as np
from torch import Tensor

from tandem.distributed.group import ProcessGroup
from tandem.errors import ConfigError


class LoggedValues:
    """{name: (sum, count)} of this rank since the last line."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._sums: dict[str, tuple[Any, int]] = {}
        self._agreed_names: list[str] = []
        self.has_new = False
        self.must_agree_on_names = True
        """True before the first line, and after some rank had a new name in a step that all ranks know of."""

    def add(self, name: str, value: Any) -> None:
        """Add a value. Never waits for the device.

        Raises ConfigError if it is not a single real number.
        """
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_complex():
                raise ConfigError(
                    f"run.log({name}=...): invalid {'complex ' * value.is_complex()}tensor of shape "
                    f"{tuple(value.shape)}; expected one number"
                )
            value = value.detach().float().reshape(())
            value = value if value.is_cuda else float(value)
        else:
            value = _real(name, value)
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + value, count + 1)
        self.has_new = self.has_new or name not in self._agreed_names

    def state(self) -> list[str]:
        """Return the settled names, for a checkpoint."""
        return self._agreed_names

    def load(self, names: list[str]) -> None:
        self._agreed_names = list(names)
        self.must_agree_on_names = not names

    def reduced(self) -> dict[str, tuple[float, float]]:
        """Return the sums and counts of all ranks, and reset them. All ranks call this at the same step."""
        if self.must_agree_on_names:
            known = self._group.gather_json(sorted({*self._agreed_names, *self._sums}))
            self._agreed_names = sorted({name for names in known for name in names})
            self.has_new = self.must_agree_on_names = False
        if not self._agreed_names:
            return {}
        local_sums = [self._sums.pop(name, (0.0, 0)) for name in self._agreed_names]
        pairs = [(float(total), float(count)) for total, count in local_sums]
        # One non-finite value would hide the mean of all others.
        finite = [pair if abs(pair[0]) < float("inf") else (0.0, 0.0) for pair in pairs]
        totals = self._group.sum([number for pair in finite for number in pair])
        return dict(zip(self._agreed_names, zip(totals[::2], totals[1::2], strict=True), strict=True))


def _real(name: str, value: Any) -> float:
    """Convert anything that is one number: Python's, NumPy's, a Decimal, an array of one element."""
    is_array_of_one = getattr(value, "size", 1) == 1
    try:
        if not is_array_of_one or not hasattr(type(value), "__float__"):
            raise TypeError
        return float(value.item() if isinstance(value, np.ndarray | np.generic) else value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"run.log({name}=...): invalid type {type(value).__name__}; expected a number, "
            "or a tensor or array of one"
        ) from error
