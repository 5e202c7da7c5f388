"""Rows of all ranks that are here already, in the place of an exchange that is under way."""

from dataclasses import dataclass


@dataclass
class Here:
    """What `ProcessGroup.gather_rows` gives, without a world."""

    found: list[list[float]]

    def is_done(self) -> bool:
        return True

    def rows(self) -> list[list[float]]:
        return self.found
