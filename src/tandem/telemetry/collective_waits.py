"""Observe when the training thread waits for other ranks, in any collective of this process.

`fsdp`, SyncBatchNorm and a user's own collectives wait inside the forward, the backward or the optimizer.
Without these waits, the rest of a step is the rank's own time. See
docs/architecture.md#measuring-a-ranks-own-time.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tandem.torch_private import is_compiling, waiting_calls

T = TypeVar("T")
_observers: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
"""At most one: the clock of this process's rank."""


def observe_waits(begin: Callable[[], T], end: Callable[[T], None]) -> None:
    """From now on, call `begin()` before each wait of the main thread, and `end` with its result after it.

    They replace the callables of an earlier call. A wait in a compiled function is not seen. Each wait costs
    about a microsecond. Nothing is passed to the collective or read from it.
    """
    _observers[:] = [(begin, end)]
    for owner, name in waiting_calls():
        call = getattr(owner, name)
        if not hasattr(call, "observed_by_tandem"):
            setattr(owner, name, _observed(call))


def _observed(call: Callable[..., Any]) -> Callable[..., Any]:
    main = threading.main_thread().ident

    def waiting(*arguments: Any, **options: Any) -> Any:
        # A compiler traces this function too, and must find only torch's own. A wait of another thread, such
        # as one that saves, does not belong to the step.
        if is_compiling() or threading.get_ident() != main:
            return call(*arguments, **options)
        begin, end = _observers[0]
        begun = begin()
        try:
            return call(*arguments, **options)
        finally:
            end(begun)

    waiting.observed_by_tandem = True  # type: ignore[attr-defined]
    return waiting
