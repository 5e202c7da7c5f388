"""A disk that has lost its power: what may be found on it after any prefix of a writer's system calls.

POSIX at its worst. Until fsync of a file, each page of it may be there, be zero, or be missing, whatever its
size says. Until fsync of a directory, each change of its names may be there or not, in any combination; one
rename within a directory is atomic. After a failed fsync the kernel calls the pages clean: a later fsync
succeeds without them.
"""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Union

from trials.system_calls import Call

PAGE = 4096
Tree = dict[str, Union["Tree", bytes]]  # a directory: name -> file or directory


class Fate(Enum):
    """Of one change: certain to be there, not yet, or given up by the kernel after a failed fsync."""

    STABLE = "stable"
    PENDING = "pending"
    GIVEN_UP = "given up"


@dataclass
class _Change:
    """To a directory: names removed, then names set. To a file: `size`, or `data` at `offset`."""

    removed: tuple[str, ...] = ()
    set: dict[str, "_Node"] = field(default_factory=dict)
    size: int | None = None
    offset: int = 0
    data: bytes = b""
    fate: Fate = Fate.PENDING


@dataclass
class _Node:
    is_directory: bool
    names: dict[str, "_Node"] = field(default_factory=dict)  # as the running system sees them
    log: list[_Change] = field(default_factory=list)

    def settle(self, fate: Fate) -> None:
        for change in self.log:
            if change.fate is Fate.PENDING:
                change.fate = fate


@dataclass(frozen=True)
class Survives:
    """Which changes that are not stable survive: of names and of data, and what data that did not looks like.

    "zeroed" data has its size on disk but not its bytes; "mixed" is decided page by page.
    """

    names: Callable[[], bool]
    data: Callable[[], str]  # "kept", "dropped", "zeroed" or "mixed"
    dice: random.Random


def policies(seed: int, shuffles: int) -> dict[str, Survives]:
    """The classical ways to lose, and `shuffles` random mixtures of them."""
    dice = random.Random(seed)

    def fixed(names: bool, data: str) -> Survives:
        return Survives(lambda: names, lambda: data, dice)

    found = {
        "dropped": fixed(False, "dropped"),
        "names without data": fixed(True, "dropped"),
        "names with zeroes": fixed(True, "zeroed"),
        "data without names": fixed(False, "kept"),
        "everything": fixed(True, "kept"),
    }
    for number in range(shuffles):
        own = random.Random(dice.random())
        share = own.random()
        found[f"reordered {number}"] = Survives(
            lambda own=own, share=share: own.random() < share,  # type: ignore[misc]
            lambda own=own: own.choice(["kept", "dropped", "zeroed", "mixed"]),  # type: ignore[misc]
            own,
        )
    return found


class Disk:
    """The volume under `root`, all of whose present content is stable."""

    def __init__(self, root: Path) -> None:
        self._root = self._read(root)

    def _read(self, path: Path) -> _Node:
        if path.is_dir():
            names = {child.name: self._read(child) for child in path.iterdir()}
            return _Node(True, names, [_Change(set=dict(names), fate=Fate.STABLE)])
        return _Node(False, log=[_Change(data=path.read_bytes(), fate=Fate.STABLE)])

    def apply(self, call: Call) -> bool:
        """Go on by one call of the trace; False for one that failed or only looks, and changes nothing.

        The mark "failed fsync PATH" stands for an fsync that failed.
        """
        if call.name == "mark":
            path = call.data.decode().removeprefix("failed fsync ")
            if path != call.data.decode() and (node := self._find(path)) is not None:
                node.settle(Fate.GIVEN_UP)
            return True
        if call.result < 0:
            return False
        match call.name:
            case "fsync" | "fdatasync":
                if (node := self._find(call.path)) is not None:
                    node.settle(Fate.STABLE)
            case "mkdir" | "mkdirat":
                self._set(call.path, _Node(True))
            case "open" | "openat" | "creat":
                self._open(call)
            case "write" | "pwrite64" | "writev" | "pwritev":
                if (node := self._find(call.path)) is not None:
                    node.log.append(_Change(offset=call.offset, data=call.data))
            case "truncate" | "ftruncate":
                if (node := self._find(call.path)) is not None:
                    node.log.append(_Change(size=call.offset))
            case "unlink" | "unlinkat" | "rmdir":
                self._remove(call.path)
            case "rename" | "renameat" | "renameat2":
                self._rename(call.path, call.target)
            case "link" | "linkat" | "copy_file_range" | "sendfile" | "fallocate":
                raise NotImplementedError(f"{call.name} is not modelled")
            case _:
                return False
        return True

    def crash(self, survives: Survives) -> Tree:
        """What is found after the power is back."""
        return _found(self._root, survives)

    def _open(self, call: Call) -> None:
        node = self._find(call.path)
        if node is None and (call.flags & os.O_CREAT or call.name == "creat"):
            self._set(call.path, _Node(False))
        elif node is not None and call.flags & os.O_TRUNC:
            node.log.append(_Change(size=0))

    def _find(self, path: str) -> _Node | None:
        node: _Node | None = self._root
        for part in [] if path == "." else path.split("/"):
            node = node.names.get(part) if node is not None else None
        return node

    def _parent(self, path: str) -> tuple[_Node, str]:
        above, _, name = path.rpartition("/")
        parent = self._find(above or ".")
        assert parent is not None, f"{path} has no parent"
        return parent, name

    def _set(self, path: str, node: _Node) -> None:
        parent, name = self._parent(path)
        parent.names[name] = node
        parent.log.append(_Change(set={name: node}))

    def _remove(self, path: str) -> None:
        parent, name = self._parent(path)
        del parent.names[name]
        parent.log.append(_Change(removed=(name,)))

    def _rename(self, source: str, target: str) -> None:
        (old, name), (new, new_name) = self._parent(source), self._parent(target)
        node = old.names.pop(name)
        new.names[new_name] = node
        if old is new:
            old.log.append(_Change((name,), {new_name: node}))
        else:  # two directories: nothing says that both halves arrive
            new.log.append(_Change(set={new_name: node}))
            old.log.append(_Change((name,)))


def _found(directory: _Node, survives: Survives) -> Tree:
    names: dict[str, _Node] = {}
    for change in directory.log:
        if change.fate is Fate.STABLE or survives.names():
            for name in change.removed:
                names.pop(name, None)
            names |= change.set
    return {
        name: _found(child, survives) if child.is_directory else _content(child, survives)
        for name, child in names.items()
    }


def _content(node: _Node, survives: Survives) -> bytes:
    content = bytearray()
    for change in node.log:
        fate = "kept" if change.fate is Fate.STABLE else survives.data()
        if fate == "dropped":
            continue
        if change.size is not None:
            content = content[: change.size].ljust(change.size, b"\0")
            continue
        data = change.data
        if fate != "kept":
            pages = [data[start : start + PAGE] for start in range(0, len(data), PAGE)]
            lost = [fate == "zeroed" or survives.dice.random() < 0.5 for _ in pages]
            data = b"".join(bytes(len(p)) if gone else p for p, gone in zip(pages, lost, strict=True))
        content = content.ljust(change.offset, b"\0")
        content[change.offset : change.offset + len(data)] = data
    return bytes(content)


def materialize(tree: Tree, path: Path) -> None:
    """Write `tree` as the directory `path`."""
    path.mkdir()
    for name, child in tree.items():
        if isinstance(child, bytes):
            (path / name).write_bytes(child)
        else:
            materialize(child, path / name)
