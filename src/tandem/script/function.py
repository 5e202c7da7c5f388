"""`python -m tandem.script.function FILE`: run the function of `tandem.launch(function)` on a rank.

The launch has written FILE into a directory that only its user can read, and removes it when the job ends.
"""

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from tandem.errors import ConfigError, text_of

RESULT = ".result"
"""The suffix of the file with rank 0's result, next to FILE."""


def write(file: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Write the call that every rank makes. Raises ConfigError if it cannot be pickled."""
    try:
        call = cloudpickle.dumps((function, arguments))
    except Exception as error:
        raise ConfigError(
            f"{file.stem} cannot be sent to the ranks ({reason(error)}); create open files, locks, "
            "connections and generators inside the function"
        ) from None
    search = [os.path.abspath(each) for each in sys.path]  # "" is the current directory
    file.write_bytes(pickle.dumps((search, call)))


def run(file: Path) -> None:
    """Call the function, and on rank 0 write its result.

    Raises ConfigError if the result cannot be pickled.
    """
    rank = os.environ["RANK"]  # the function may change it
    search, call = pickle.loads(file.read_bytes())
    sys.path[:] = dict.fromkeys([*search, *sys.path])  # the caller's modules, in the caller's order
    sys.argv = [file.stem]
    function, arguments = pickle.loads(call)
    result = function(*arguments)
    if rank != "0":
        return
    try:
        packed = cloudpickle.dumps(result)
    except Exception as error:
        raise ConfigError(
            f"{file.stem} returned {type(result).__name__}, which cannot be pickled ({reason(error)}); "
            "return numbers, text, tensors, or lists and dicts of them"
        ) from None
    partial = file.with_suffix(".partial")
    partial.write_bytes(packed)
    partial.replace(file.with_suffix(RESULT))


def reason(error: Exception) -> str:
    """Return the error on one line."""
    return f"{type(error).__name__}: {text_of(error)}".partition("\n")[0]


if __name__ == "__main__":
    run(Path(sys.argv[1]))
