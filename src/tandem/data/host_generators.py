"""Detect whether code has used the CPU's global generators, of torch, `random` and NumPy.

Copying all three states with their own functions takes 130 us, as long as loading a batch of small samples.
The states of `random` and NumPy are therefore read from memory, in 1 us. They are never written there.
"""

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, Self, TypeVar

import numpy
import torch
from numpy.random import mtrand
from torch import Tensor

T = TypeVar("T")


class HostGenerator(NamedTuple):
    """A global generator that a dataset may use; `state()` returns a copy of its state."""

    seed: Callable[[int], object]
    state: Callable[[], Any]
    has: Callable[[Any], bool]
    """Whether the generator is in a given state."""
    restore: Callable[[Any], object]


_MT19937 = struct.Struct("=624Ii")
"""NumPy's state: 624 words and the position in them. CPython has the position first."""
_python: Any = random.getrandbits.__self__  # type: ignore[attr-defined]
_PYTHON_ADDRESS = id(_python) + object.__basicsize__
_for_data = numpy.random.MT19937(0)
"""NumPy's generator while data is loaded: putting it in place takes 0.4 us, and copying a state 120 us."""
_NUMPY_ADDRESS = _for_data.ctypes.state_address


def _state_in_memory() -> tuple[bytes, Any]:
    # The half of a pair of normal numbers that is still to be returned belongs to the state.
    return ctypes.string_at(_PYTHON_ADDRESS, _MT19937.size), _python.gauss_next


def _restore_from_memory(state: tuple[bytes, Any]) -> None:
    random.setstate(_as_python_has_it(state))


def _as_python_has_it(state: tuple[bytes, Any]) -> tuple[Any, ...]:
    position, *words = struct.unpack("=i624I", state[0])
    return random.Random.VERSION, (*words, position), state[1]


def _reads_memory() -> bool:
    """Return True if this interpreter stores the state of `random` as known CPython versions do."""
    if sys.implementation.name != "cpython" or type(_python).__basicsize__ < _MT19937.size:
        return False
    return _as_python_has_it(_state_in_memory()) == random.getstate()


def _torch_has(state: Tensor) -> bool:
    # torch.equal takes three times as long.
    now = torch.default_generator.get_state()
    return not _difference(now.data_ptr(), state.data_ptr(), state.numel())


_difference = ctypes.CDLL(None).memcmp
_difference.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
TORCH = HostGenerator(
    torch.default_generator.manual_seed,
    torch.default_generator.get_state,
    _torch_has,
    torch.default_generator.set_state,
)
PYTHON = (
    HostGenerator(
        random.seed, _state_in_memory, lambda state: _state_in_memory() == state, _restore_from_memory
    )
    if _reads_memory()
    else HostGenerator(
        random.seed, random.getstate, lambda state: random.getstate() == state, random.setstate
    )
)
# NumPy's global generator takes a seed of 32 bits. It is used inside of KeptGenerators, which restores it.
NUMPY = HostGenerator(
    lambda seed: mtrand.seed(seed & 0xFFFFFFFF),
    lambda: ctypes.string_at(_NUMPY_ADDRESS, _MT19937.size),
    lambda state: ctypes.string_at(_NUMPY_ADDRESS, _MT19937.size) == state,
    lambda _: None,
)
HOST_GENERATORS = (TORCH, PYTHON, NUMPY)


class KeptGenerators:
    """Restores the CPU's global generators at the end of a block. Must not be nested.

    The only loss: if one of a pair of NumPy's normal numbers was drawn, the second is lost.
    """

    def __enter__(self) -> Self:
        self._of_numpy = mtrand.get_bit_generator()
        mtrand.set_bit_generator(_for_data)
        self._before = (TORCH, TORCH.state()), (PYTHON, PYTHON.state()), (NUMPY, NUMPY.state())
        self._touched = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._touched:
            for generator, state in self._before:
                generator.restore(state)
        mtrand.set_bit_generator(self._of_numpy)

    def seed(self, seed: int) -> None:
        """Seed all of them."""
        self._touched = True
        for generator in HOST_GENERATORS:
            generator.seed(seed)

    def changed(self) -> list[HostGenerator]:
        """Return the generators whose states are not those at the beginning of the block."""
        found = [generator for generator, state in self._before if not generator.has(state)]
        self._touched = bool(found)
        return found


# A seed or a state can also be read without drawing, as in
# torch.Generator().manual_seed(torch.initial_seed() + index).

_getstate, _get_state = random.getstate, numpy.random.get_state
READS = ("initial_seed", "get_state", "clone_state", "getstate")


class _Watched:
    """Replaces torch's generator in torch.random: all functions there use it, under any name."""

    def __init__(self, seen: set[HostGenerator]) -> None:
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        self._seen.add(TORCH)
        return getattr(torch.default_generator, name)


class NotedReads:
    """Adds a generator to `seen` when its seed or state is read in the block, with a function of a module.

    These are torch.initial_seed, torch.get_rng_state, random.getstate, numpy.random.get_state, and functions
    that use them, such as torch.random.fork_rng. As with KeptGenerators, one block at a time.
    """

    def __init__(self) -> None:
        self.seen: set[HostGenerator] = set()
        self._torch = _Watched(self.seen)

    def __enter__(self) -> None:
        vars(torch.random)["default_generator"] = self._torch
        vars(random)["getstate"] = self._python_state
        vars(numpy.random)["get_state"] = self._numpy_state

    def __exit__(self, *_: object) -> None:
        vars(torch.random)["default_generator"] = torch.default_generator
        vars(random)["getstate"] = _getstate
        vars(numpy.random)["get_state"] = _get_state

    def _python_state(self) -> Any:
        self.seen.add(PYTHON)
        return _getstate()

    def _numpy_state(self, *given: Any, **named: Any) -> Any:
        self.seen.add(NUMPY)
        return _get_state(*given, **named)


class AllNotedReads(NotedReads):
    """Also notes calls of the generators' methods. Loading takes about twice as long."""

    def __enter__(self) -> None:
        super().__enter__()
        # A running profiler would be ended.
        self._profiles = sys.getprofile() is None
        if self._profiles:
            sys.setprofile(self._look)
        else:
            self.seen.update(HOST_GENERATORS)

    def __exit__(self, *exception: object) -> None:
        if self._profiles:
            sys.setprofile(None)
        super().__exit__(*exception)

    def _look(self, _frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in READS:
            owner = getattr(function, "__self__", None)
            if owner is torch.default_generator:
                self.seen.add(TORCH)
            elif owner is _python:
                self.seen.add(PYTHON)


def unobserved(read: Callable[[], T]) -> T:
    """Return `read()`, and do not let `AllNotedReads` slow it down, because it never draws."""
    observer = sys.getprofile()
    # A profiler of the user's own stays.
    if not isinstance(getattr(observer, "__self__", None), AllNotedReads):
        return read()
    sys.setprofile(None)
    try:
        return read()
    finally:
        sys.setprofile(observer)
