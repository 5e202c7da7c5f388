"""What nodes tell each other when all have come: which ranks each one has, and which generation it is.

torch reads this from the store in C, where no signal is heard, and waits a minute for a node that has come
and is gone again. Here each wait looks at signals, at the job's verdict and at who is still there.
"""

import re
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from tandem import running
from tandem.launch.rendezvous import StoreLostError
from tandem.launch.stops import THERE
from tandem.platforms.placement import Placement
from tandem.timeouts import SHORTEST_LOOK_SECONDS, STORE_READ_SECONDS


class RoundStore:
    """The store of one round of the rendezvous; reads wait for keys that other nodes have yet to write.

    `look` is called in between, and raises what ends the wait; looks are at most `longest_pause` seconds
    apart. All else is the store's own.
    """

    def __init__(self, store: Any, look: Callable[[], None], longest_pause: float) -> None:
        self._store, self._look, self._longest_pause = store, look, longest_pause

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        """Raises StoreLostError where nobody writes it in time, and what `look` raises."""
        self._await([key])
        return bytes(self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """As `get`, for all of them."""
        self._await(keys)
        return list(self._store.multi_get(keys))

    def _await(self, keys: Sequence[str]) -> None:
        deadline, pause = running.now() + STORE_READ_SECONDS, SHORTEST_LOOK_SECONDS
        while not self._store.check(list(keys)):
            self._look()
            if running.now() > deadline:
                raise StoreLostError(f"a node joined but sent nothing for {STORE_READ_SECONDS} s")
            time.sleep(pause)
            pause = min(2 * pause, self._longest_pause)


def agree_on_generation(store: Any, mine: tuple[int, str] | None) -> tuple[str, int, str]:
    """(prefix of its keys, its number, what there is of the run), as the first node says, which has `mine`.

    Raises StoreLostError.
    """
    key, form = "tandem/generation", rf"\d{{1,9}}\.[0-9a-f]{{32}}\.({'|'.join(THERE)})"
    if mine is not None:
        store.set(key, f"{mine[0]}.{uuid.uuid4().hex}.{mine[1]}")
    number, name, there = agreed(store, key, form).split(".")
    return f"generation/{number}.{name}", int(number), there


def agreed(store: Any, key: str, form: str) -> str:
    """What the first node has written there for all, of this form (a pattern). Raises StoreLostError."""
    text = bytes(store.get(key)).decode(errors="replace")
    if re.fullmatch(form, text, re.ASCII) is None:
        raise StoreLostError(f"invalid value {text[:40]!r} in the store for {key}")
    return text


def check_all_are_in(placement: Placement, nodes: int) -> None:
    """A rendezvous of `nodes` is what this job was asked to be. Raises StoreLostError: go round again."""
    if placement.elastic is None and nodes != placement.nodes:
        asked = f"{nodes} of {placement.nodes} nodes"
        raise StoreLostError(f"the rendezvous started with {asked}, but all are required")
