"""`tandem train`, and how its settings and the loop's object travel: which files they are passed into.

    python tests/walked.py settings|loop [flags of tandem train]

A walk begins in the rank's own function (`_run`, `train`). Each call that is given the settings (also in
the rank's session), one of their slices, or the loop's object, is a stay in the file of its function; calls
in a row into one file are one stay. The last line says how many stays and returns to a file already left
there were.
"""

import dataclasses
import functools
import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

import tandem.cli
from tandem.config import Settings, slices
from tandem.rank import task
from tandem.rank.session import RankSession
from tandem.training import loop

SRC = Path(tandem.cli.__file__).parent
WALKS: dict[str, tuple[tuple[type, ...], Any, str]] = {
    "settings": (
        (Settings, RankSession, *filter(dataclasses.is_dataclass, vars(slices).values())), task, "_run"
    ),
    "loop": ((loop.LoopState,), task, "train"),
}


def stays(entered: list[tuple[str, str]]) -> list[str]:
    """Of files and functions entered, in order, the first of each stay, as "file: function"."""
    pairs = zip([("", ""), *entered], entered, strict=False)
    return [": ".join(each) for before, each in pairs if before[0] != each[0]]


def walk(kinds: tuple[type, ...], module: Any, name: str) -> list[tuple[str, str]]:
    """Watch `name` of `module` when it is called; the list that files and functions will be in."""
    entered: list[tuple[str, str]] = []
    function = getattr(module, name)

    @functools.cache
    def arguments_of(code: CodeType) -> list[str]:
        if not code.co_filename.startswith(f"{SRC}/"):
            return []
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return [name for name in names if name != "self"]

    def see(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and (names := arguments_of(frame.f_code)):
            values = frame.f_locals
            if any(isinstance(values.get(each), kinds) for each in names):
                entered.append((frame.f_code.co_filename.removeprefix(f"{SRC}/"), frame.f_code.co_name))

    def watched(*arguments: Any) -> Any:
        sys.setprofile(see)
        try:
            return function(*arguments)
        finally:
            sys.setprofile(None)

    setattr(module, name, watched)
    return entered


def main() -> None:
    entered, leave = walk(*WALKS[sys.argv.pop(1)]), os._exit

    def say_and_leave(code: int) -> NoReturn:
        found = stays(entered)
        files = [stay.partition(":")[0] for stay in found]
        print(*found, f"{len(found)} stays, {len(files) - len(set(files))} returns", sep="\n", flush=True)
        leave(code)

    os._exit = say_and_leave  # type: ignore[assignment]
    sys.argv.insert(1, "train")
    tandem.cli.main()


if __name__ == "__main__":
    main()
