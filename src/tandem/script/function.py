"""`python -m tandem.script.function FILE`: run the function of `tandem.launch(function)` on a rank.

The launch has written FILE into a directory that only its user can read, and removes it when the job ends.
"""

import io
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle

from tandem.errors import ConfigError
from tandem.text import with_type

RESULT = ".result"
"""The suffix of the file with rank 0's result, next to FILE."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, but code keeps its file name, for tracebacks and for `linecache`.

    cloudpickle 3.1 replaces that name by "<dynamic-code>".
    """

    def __init__(self, buffer: io.BytesIO) -> None:
        theirs: Mapping[type, Callable[..., Any]] = cloudpickle.Pickler.dispatch_table
        self._reduce_code = theirs[CodeType]
        self.dispatch_table = {**theirs, CodeType: self._with_file}
        super().__init__(buffer)  # reads the table

    def _with_file(self, code: CodeType) -> tuple[Any, ...]:
        file = code.co_filename
        make, arguments = self._reduce_code(code)
        return _code_of, (os.path.abspath(file) if os.path.exists(file) else file, make, arguments)


def _code_of(file: str, make: Callable[..., CodeType], arguments: Sequence[Any]) -> CodeType:
    return make(*arguments).replace(co_filename=file)


def write(file: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Write the call that every rank makes. Raises ConfigError if it cannot be pickled."""
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump((function, arguments))
    except Exception as error:
        raise ConfigError(
            f"{file.stem} cannot be sent to the ranks ({reason(error)}); create open files, locks, "
            "connections and generators inside the function"
        ) from None
    search = [os.path.abspath(each) for each in sys.path]  # "" is the current directory
    # The call is a pickle inside a pickle: its modules can be imported only after sys.path has been set.
    file.write_bytes(pickle.dumps((search, buffer.getvalue())))


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
    # Rename the file, so that half a result of a rank that is killed here is never read as a result.
    partial = file.with_suffix(".partial")
    partial.write_bytes(packed)
    partial.replace(file.with_suffix(RESULT))


def reason(error: Exception) -> str:
    """Return the error on one line."""
    return with_type(error).partition("\n")[0]


if __name__ == "__main__":
    run(Path(sys.argv[1]))
