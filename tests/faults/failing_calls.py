"""A volume on which one call fails, or all from it on, or one that has worked says that it has not."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

CALLS = (
    "open",
    "write",
    "fsync",
    "close",
    "mkdir",
    "rename",
    "unlink",
    "rmdir",
    "listdir",
    "scandir",
    "stat",
    "lstat",
    "fstat",
)
Mode = Literal["once", "forever", "after"]


class Failing:
    """`hit`: whether the call that fails was reached."""

    def __init__(self, nth: int, number: int, mode: Mode) -> None:
        self.nth, self.number, self.mode = nth, number, mode
        self.count = 0

    @property
    def hit(self) -> bool:
        return self.count > self.nth

    def wrap(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "close" and not fcntl.fcntl(args[0], fcntl.F_GETFL) & os.O_ACCMODE:
                return real(*args, **kwargs)  # nothing was written: no volume refuses that
            mine, self.count = self.count, self.count + 1
            fails = mine == self.nth or (self.mode == "forever" and mine > self.nth)
            if fails and (self.mode == "after" or name == "close"):  # Linux closes in any case
                real(*args, **kwargs)
            if fails:
                raise OSError(self.number, os.strerror(self.number))
            return real(*args, **kwargs)

        return call


@contextmanager
def failing(nth: int, number: int, mode: Mode) -> Iterator[Failing]:
    """In this process the `nth` file call (from 0) fails with errno `number`."""
    state, real = Failing(nth, number, mode), {name: getattr(os, name) for name in CALLS}
    for name in CALLS:
        setattr(os, name, state.wrap(name, real[name]))
    try:
        yield state
    finally:
        for name in CALLS:
            setattr(os, name, real[name])


@contextmanager
def slow(seconds: float) -> Iterator[None]:
    """Every file call of this process takes longer."""
    real = {name: getattr(os, name) for name in CALLS}

    def wrap(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return real[name](*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, wrap(name))
    try:
        yield
    finally:
        for name in CALLS:
            setattr(os, name, real[name])
