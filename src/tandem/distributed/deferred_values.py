"""Build a model without memory for its values, and compute the values later, one tensor at a time.

While a model is built, its tensors are torch's fake tensors: they have shapes but no memory. Each operation
on them is recorded and draws no random number. `DeferredValues.computed` repeats the operations on real
memory, in the same order. It draws the same numbers, so the values have the same bits. A tensor's memory is
freed once no later operation needs it. See docs/architecture.md#building-a-model-that-fits-no-rank.
"""

import gc
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.errors import TandemError
from tandem.torch_private import FakeTensors

T = TypeVar("T")
OVERWRITING = frozenset(
    f"aten::{name}_"
    for name in (
        "bernoulli", "cauchy", "copy", "exponential", "fill", "geometric", "log_normal", "normal", "random",
        "uniform", "zero",
    )
)  # fmt: skip
"""Operations that write each element of their first argument and do not read it."""
RESIZING = frozenset(f"aten::{name}" for name in ("resize_", "resize_as_"))


class NotDeferrableError(TandemError):
    """The model's values cannot be computed later; the message says why."""


class _View(NamedTuple):
    """A tensor: its memory, and its place in it."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor in real `memory`, given as bytes."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


class _Value(NamedTuple):
    """A tensor that already had values while the model was built."""

    tensor: Tensor


@dataclass
class _Memory:
    """The memory of one or more fake tensors, with the operations on it."""

    storage: Any  # while it lives, no other storage has its address
    device: torch.device
    bytes: int
    uses: list[int]
    overwrites: set[int]


class _Operation(NamedTuple):
    """An operation with its arguments, the memories that it creates, and those that it writes to."""

    call: Callable[..., Any]
    args: Any
    options: Any
    reads: frozenset[int]
    writes: frozenset[int]
    creates: tuple[tuple[int, _View], ...]
    """(index among the results, view) of each result with new memory."""
    is_random: bool
    default: torch.dtype


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _mapped(value: Any, kind: Any, change: Callable[[Any], Any]) -> Any:
    """Copy lists, tuples and dicts, with each value of `kind` changed."""
    if isinstance(value, kind):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, kind, change) for each in value)
    if isinstance(value, dict):
        return {key: _mapped(each, kind, change) for key, each in value.items()}
    return value


class _Generators:
    """Detects that a generator was seeded or reset during the build, which loses the order of draws.

    Each random operation draws one number here, so after a reset, the generator is not in the expected state.
    """

    def __init__(self) -> None:
        self._known: list[tuple[torch.Generator, Tensor, torch.Generator]] = []
        self.expects(torch.default_generator)

    def expects(self, generator: torch.Generator) -> None:
        """Check a generator before an operation draws from it. Raises NotDeferrableError."""
        for known, _, shadow in self._known:
            if known is generator:
                if not torch.equal(known.get_state(), shadow.get_state()):
                    raise NotDeferrableError("it seeds a random generator, or sets its state")
                for each in (known, shadow):
                    if each.device.type == "cpu":
                        torch.empty(1).uniform_(generator=each)
                return
        state = generator.get_state()
        shadow = torch.Generator(generator.device)
        shadow.set_state(state)
        self._known.append((generator, state, shadow))

    def check(self) -> None:
        """Raise NotDeferrableError if a generator has another state than expected."""
        for generator, _, _ in self._known:
            self.expects(generator)

    def reset(self) -> None:
        """Set each generator back to its state before the model was built."""
        for generator, state, _ in self._known:
            generator.set_state(state)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations of its block, inside `fake.mode()`."""

    def __init__(self, fake: FakeTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self.generators = _Generators()
        self.operations: list[_Operation] = []
        self.memories: list[_Memory] = []
        self._index: dict[int, int] = {}
        self.forget: Callable[[], None] = lambda: None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        found = [*_tensors((args, options))]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if found and not is_random and not any(map(self._is_fake, found)):
            with self._fake.paused():
                return func(*args, **options)  # on known values, such as NumPy's
        if func is torch.ops.aten._local_scalar_dense.default:
            with self._fake.paused():
                return self._value_of(args[0]).item()
        name = func._schema.name
        if name in RESIZING:
            raise NotDeferrableError(f"it calls {name}")
        if is_random:
            with self._fake.paused():
                self.generators.expects(options.get("generator") or torch.default_generator)
        noted = _mapped((args, options), Tensor, self._noted)
        written = [] if name == "aten::set_" else _written(func, args, options)
        result = func(*args, **options)
        self.forget()
        self._add(func, noted, written, result, is_random)
        return result

    def _add(self, func: Any, noted: Any, written: list[Tensor], result: Any, is_random: bool) -> None:
        creates = self._created(func, result)
        writes = self._overwritten(func, noted, written)
        if not creates and not writes:
            return  # a view, whose place in its memory is recorded when it is used
        reads = {view.memory for view in _views(noted)}
        made = {view.memory for _, view in creates}
        for index in reads | writes | made:
            self.memories[index].uses.append(len(self.operations))
        for index in made:
            self.memories[index].overwrites.add(len(self.operations))
        self.operations.append(
            _Operation(
                func, noted[0], noted[1], frozenset(reads), frozenset(writes), tuple(creates), is_random,
                torch.get_default_dtype(),
            )
        )  # fmt: skip

    def _created(self, func: Any, result: Any) -> list[tuple[int, _View]]:
        """Return (index, view) of each result that is in new memory."""
        creates = []
        for at, each in enumerate(_tensors(result)):
            if self._is_fake(each):
                is_new = each.untyped_storage()._cdata not in self._index
                view = self.view(each, may_be_new=func._schema.name != "aten::set_")
                if is_new:
                    creates.append((at, view))
        # A real tensor would share memory with an argument, and later writes would change both.
        if creates and any(each.alias_info is not None for each in func._schema.returns):
            raise NotDeferrableError(f"{func} returned a copy")
        return creates

    def _overwritten(self, func: Any, noted: Any, written: list[Tensor]) -> set[int]:
        """Return the memories that an operation writes to; record which of them it overwrites."""
        views = [self.view(each) for each in written]
        if func._schema.name in OVERWRITING and views:
            memory = self.memories[views[0].memory]
            sources = {view.memory for view in _views((noted[0][1:], noted[1]))}
            if views[0].memory not in sources and _is_whole(written[0], memory):
                memory.overwrites.add(len(self.operations))
        return {view.memory for view in views}

    def note_call(self, call: Callable[..., Any], tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        """Record, as one operation, a function that overwrites `tensor` with random values and reads them."""
        with self._fake.paused():
            self.generators.expects(options.get("generator") or torch.default_generator)
        view = self.view(tensor)
        memory = self.memories[view.memory]
        if _is_whole(tensor, memory):
            memory.overwrites.add(len(self.operations))
        memory.uses.append(len(self.operations))
        writes = frozenset([view.memory])
        self.operations.append(
            _Operation(call, (view, *args), options, writes, writes, (), True, torch.get_default_dtype())
        )
        return tensor

    def _is_fake(self, tensor: Tensor) -> bool:
        return isinstance(tensor, self._fake.kind)

    def _noted(self, tensor: Tensor) -> _View | _Value:
        if self._is_fake(tensor):
            return self.view(tensor)
        with self._fake.paused():
            return _Value(tensor.detach().clone())

    def view(self, tensor: Tensor, may_be_new: bool = False) -> _View:
        """Return where a tensor is. Raises NotDeferrableError if no recorded operation has created it."""
        if not self._is_fake(tensor):
            raise NotDeferrableError("it writes into a tensor that was not created by torch")
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise NotDeferrableError("it has a sparse, conjugated or negated tensor")
        storage = tensor.untyped_storage()
        index = self._index.get(storage._cdata)
        if index is None:
            if not may_be_new:
                raise NotDeferrableError("it loads tensors from a file")
            index = self._index[storage._cdata] = len(self.memories)
            self.memories.append(_Memory(storage, tensor.device, storage.nbytes(), [], set()))
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        return _View(index, size, stride, int(tensor.storage_offset()), tensor.dtype)

    def _value_of(self, tensor: Tensor) -> Tensor:
        """Compute a tensor's values, because the code that builds the model reads a number from it."""
        view = self.view(tensor)
        needed = {view.memory}
        chosen = []
        for operation in reversed(self.operations):
            made = {each.memory for _, each in operation.creates}
            if needed & (operation.writes | made):
                if operation.is_random:
                    raise NotDeferrableError("it reads random values of a tensor")
                chosen.append(operation)
                needed |= operation.reads
        real: dict[int, Tensor] = {}
        for operation in reversed(chosen):
            _repeat(operation, real, self.memories)
        return view.of(real[view.memory])


def _views(noted: Any) -> list[_View]:
    found = list[_View]()
    _mapped(noted, _View, found.append)
    return found


def _is_whole(tensor: Tensor, memory: _Memory) -> bool:
    return tensor.is_contiguous() and not tensor.storage_offset() and tensor.nbytes == memory.bytes


def _written(func: Any, args: Any, options: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    arguments = func._schema.arguments
    found = [
        value
        for argument, value in [*zip(arguments, args, strict=False), *_by_name(arguments, options)]
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return list(_tensors(found))


def _by_name(arguments: Sequence[Any], options: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return [(each, options[each.name]) for each in arguments if each.name in options]


def _repeat(operation: _Operation, real: dict[int, Tensor], memories: Sequence[_Memory]) -> None:
    """Run an operation on real memory. `real`: memory by index, as bytes; missing entries are allocated."""

    def value(noted: _View | _Value) -> Tensor:
        if isinstance(noted, _Value):
            return noted.tensor.clone()
        if noted.memory not in real:
            about = memories[noted.memory]
            real[noted.memory] = torch.empty(about.bytes, dtype=torch.uint8, device=about.device)
        return noted.of(real[noted.memory])

    args, options = _mapped((operation.args, operation.options), _View | _Value, value)
    before = torch.get_default_dtype()
    torch.set_default_dtype(operation.default)
    try:
        with torch.no_grad():
            results = list(_tensors(operation.call(*args, **options)))
    finally:
        torch.set_default_dtype(before)
    for at, view in operation.creates:
        got = results[at]
        if tuple(got.size()) != view.size or got.dtype != view.dtype:
            raise RuntimeError(f"{operation.call} returned {got.dtype} {tuple(got.size())}, not {view}")
        if view.memory not in real:
            real[view.memory] = _memory_of(got, view, memories[view.memory])


def _memory_of(got: Tensor, view: _View, about: _Memory) -> Tensor:
    """Return the bytes behind a result, laid out as its fake tensor was."""
    storage = got.untyped_storage()
    if (tuple(got.stride()), got.storage_offset()) != (view.stride, view.offset) or (
        storage.nbytes() != about.bytes
    ):
        fresh = torch.empty(about.bytes, dtype=torch.uint8, device=about.device)
        view.of(fresh).copy_(got)
        return fresh
    return torch.empty(0, dtype=torch.uint8, device=got.device).set_(storage)


class ModuleTensor(NamedTuple):
    """An attribute of a module that holds a tensor without values."""

    module: nn.Module
    name: str
    path: str
    tensor: Tensor


class DeferredValues:
    """The values of a model that was built without them, with parameters and buffers on the meta device.

    `digest`: equal on ranks that built the same model. `tensors`: by the order in which values are computed.
    """

    def __init__(self, recorder: _Recorder, views: dict[int, tuple[Tensor, _View]]) -> None:
        self._operations = recorder.operations
        self._memories = recorder.memories
        self._views = views  # by the identity of the tensor on the meta device
        for memory in self._memories:
            memory.storage = None
        final = dict.fromkeys(view.memory for _, view in views.values())
        self._order = sorted(final, key=lambda index: (self._memories[index].uses or [-1])[-1])

    def module_tensors(self, model: nn.Module) -> list[ModuleTensor]:
        """Return where the model holds the tensors; one tensor may be in several places."""
        found = []
        for prefix, module in model.named_modules():
            for name, tensor in _held(module):
                if id(tensor) in self._views:
                    found.append(ModuleTensor(module, name, f"{prefix}.{name}".strip("."), tensor))
        return found

    def digest(self, model: nn.Module) -> str:
        """Return a digest of names, shapes and the order of computation."""
        forms = [(each.path, self._views[id(each.tensor)][1]) for each in self.module_tensors(model)]
        return hashlib.sha256(repr((forms, self._order)).encode()).hexdigest()

    def computed(self, computes: bool) -> Iterator[tuple[int, Tensor | None]]:
        """Yield (identity of the tensor on the meta device, its values), each once; None unless `computes`.

        The values are valid until the next iteration. All ranks get the same order.
        """
        tensors: defaultdict[int, list[tuple[int, _View]]] = defaultdict(list)
        for key, (_, view) in self._views.items():
            tensors[view.memory].append((key, view))
        if not computes:
            for index in self._order:
                yield from ((key, None) for key, _ in tensors[index])
            return
        for index, memory in self._replayed():
            yield from ((key, view.of(memory)) for key, view in tensors[index])

    def _replayed(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, memory) of each of the model's memories once it is final, in the same order."""
        waiting = iter(self._order)
        following = next(waiting, None)
        real: dict[int, Tensor] = {}
        for number, operation in enumerate(self._operations):
            _repeat(operation, real, self._memories)
            made = {view.memory for _, view in operation.creates}
            for index in operation.reads | operation.writes | made:
                if self._is_final(index, number) and index in self._order:
                    continue
                if self._is_last(index, number):
                    real.pop(index, None)
            while following is not None and self._is_final(following, number):
                yield following, real.pop(following)
                following = next(waiting, None)

    def _is_final(self, index: int, number: int) -> bool:
        return self._memories[index].uses[-1] == number

    def _is_last(self, index: int, number: int) -> bool:
        """Return whether no operation after `number` reads the memory's current content."""
        memory = self._memories[index]
        later = next((use for use in memory.uses if use > number), None)
        return later is None or later in memory.overwrites


def _held(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the tensors that a module holds by name: parameters, buffers, and plain attributes."""
    attributes = [(name, value) for name, value in vars(module).items() if isinstance(value, Tensor)]
    named = [*module._parameters.items(), *module._buffers.items(), *attributes]
    return [(name, value) for name, value in named if value is not None]


def build_deferred(fake: FakeTensors, build: Callable[[], nn.Module]) -> tuple[nn.Module, DeferredValues]:
    """Return (the model, with tensors on the meta device, its values).

    Tensors that already have values during the build, such as those from NumPy, keep them. Raises
    NotDeferrableError and any error of `build`, and leaves torch's generators unchanged.
    """
    recorder = _Recorder(fake)
    try:
        with fake.mode() as forget, recorder, fake.whole_calls(recorder.note_call):
            recorder.forget = forget
            model = build()
        recorder.generators.check()
    finally:
        recorder.generators.reset()
    values = DeferredValues(recorder, _without_memory(recorder, fake, model))
    gc.collect()
    # A weak reference to a tensor would keep Module.to() from swapping it.
    left = [each for each in gc.get_objects() if type(each) is fake.kind and fake.is_of_last_mode(each)]
    if left:
        raise NotDeferrableError(f"it keeps a tensor of shape {list(left[0].shape)} outside its modules")
    return model, values


def _without_memory(
    recorder: _Recorder, fake: FakeTensors, model: nn.Module
) -> dict[int, tuple[Tensor, _View]]:
    """Replace the model's fake tensors; return {identity of the new one: (it, where the old one was)}."""
    views: dict[int, tuple[Tensor, _View]] = {}
    replaced: dict[int, tuple[Tensor, Tensor]] = {}
    for path, module in model.named_modules():
        for name, tensor in _held(module):
            if not isinstance(tensor, fake.kind):
                continue
            if id(tensor) not in replaced:
                empty = _without_values(tensor, fake, f"{path}.{name}".strip("."))
                replaced[id(tensor)] = tensor, empty  # keeps the old one, so that its identity is unique
                views[id(empty)] = empty, recorder.view(tensor)
            setattr(module, name, replaced[id(tensor)][1])
    return views


def _without_values(tensor: Tensor, fake: FakeTensors, path: str) -> Tensor:
    """Return the tensor on the meta device that replaces a fake one."""
    if is_lazy(tensor):
        raise NotDeferrableError(f"{path} is lazy")
    if tensor.grad_fn is not None:
        raise NotDeferrableError(f"{path} is computed from parameters")
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    if not isinstance(tensor, nn.Parameter):
        return empty
    made = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    made.__dict__.update(fake.own_attributes(tensor))
    return made
