"""Snapshots in the node's memory: what was taken comes back, and a torn one is never taken for whole."""

import ctypes
import errno
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from whole_snapshots import newest_snapshot

import played_gpu
from tandem.checkpoint import node_memory as memory_module
from tandem.checkpoint import snapshot as snapshot_module
from tandem.checkpoint.node_memory import NodeMemory
from tandem.checkpoint.pinned import Pinned
from tandem.checkpoint.snapshot import SLOT, Layout, Snapshots, newest_step
from tandem.checkpoint.state import flatten, unflatten
from tandem.errors import ConfigError
from tandem.process import memory_left

FORMS = st.lists(
    st.tuples(
        st.sampled_from(["float32", "float64", "int64", "uint8", "bfloat16"]),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    max_size=12,
)


def state_at(step: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((7, 5), float(step)), "mean": torch.full((3,), step * 10.0)},
        "optimizer": {
            "state": {0: {"m": torch.full((7, 5), step + 0.5), "step": torch.tensor(float(step))}},
            "param_groups": [{"lr": 0.1 / step, "betas": (0.9, 0.999), "params": [0]}],
        },
        "step": step,
    }


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(same(one[k], other[k]) for k in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))  # type: ignore[arg-type]
    return one == other


@given(FORMS, st.integers(1, 5), st.data())
@settings(max_examples=80, deadline=None)
def test_parts_cover_every_element_once(
    forms: list[tuple[str, tuple[int, ...]]], ranks: int, data: st.DataObject
) -> None:
    own = (
        data.draw(st.sets(st.integers(0, max(len(forms) - 1, 0)), max_size=len(forms))) if forms else set()
    )
    layout = Layout.of(forms, own, ranks)
    for index, (_, shape) in enumerate(forms):
        written = [
            (first, first + count, rank)
            for rank in range(ranks)
            for at, first, count, _ in layout.part(rank)
            if at == index
        ]
        covered = sorted((first, last) for first, last, _ in written)
        elements = torch.Size(shape).numel()
        assert sum(last - first for first, last in covered) == elements
        assert all(one[1] == other[0] for one, other in zip(covered, covered[1:], strict=False))
        if index in own:
            assert {rank for *_, rank in written} <= {0}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_newest_whole_snapshot_comes_back(ranks: int) -> None:
    regions = [NodeMemory() for _ in range(ranks)]
    assert newest_snapshot(regions) is None
    each = [Snapshots(regions, rank, None) for rank in range(ranks)]
    for step in range(1, 6):
        for rank in each:
            rank.take(step, state_at(step), own={1})
    step, state, _ = newest_snapshot(regions) or (0, {}, 0)
    assert step == 5 and same(state, state_at(5))
    each[0].take(6, state_at(6), own={1})  # the others were killed before they wrote theirs
    step, state, _ = newest_snapshot(regions) or (0, {}, 0)
    assert (
        (step, same(state, state_at(6))) == (6, True)
        if ranks == 1
        else (step, same(state, state_at(5))) == (5, True)
    )


def test_the_newest_step_of_a_node_is_one_that_all_its_ranks_have() -> None:
    shared, own = [NodeMemory(), NodeMemory()], [NodeMemory(), NodeMemory(), NodeMemory()]
    assert newest_step(shared, own) is None
    each = [Snapshots([region], 0, None) for region in own[:2]]  # the third is of a rank without values
    for step, ranks in ((3, each), (4, each), (5, each[:1])):
        for rank in ranks:
            rank.take(step, state_at(step), own=())
    assert newest_step(shared, own) == 4
    for number in range(2):
        Snapshots(shared, number, None).take(9, state_at(9), own=())
    assert newest_step(shared, own) == 9


def test_a_restarted_rank_spares_the_newer_slot() -> None:
    regions = [NodeMemory()]
    before = Snapshots(regions, 0, None)
    for step in (1, 2, 3):
        before.take(step, state_at(step), own=())
    newest = newest_snapshot(regions)
    assert newest is not None
    again = Snapshots(regions, 0, newest.slot)
    again._lay_out([("float32", (7, 5)), ("float32", (3,)), ("float32", (7, 5)), ("float32", ())], (), 100)
    assert (newest_snapshot(regions) or (0,))[0] == 3, "until the next one is whole"
    again.take(4, state_at(4), own=())
    assert (newest_snapshot(regions) or (0,))[0] == 4


def tear(region: NodeMemory, slot: int) -> None:
    """The rank of this region was killed while it wrote that slot."""
    memory = region.map(region.size())
    SLOT.pack_into(memory, slot * SLOT.size, SLOT.unpack_from(memory, slot * SLOT.size)[0], 0, 0)


@pytest.mark.parametrize("torn", [0, 1])
@pytest.mark.parametrize("steps", [4, 5])
def test_ranks_killed_in_the_middle_write_into_the_same_slot_again(torn: int, steps: int) -> None:
    """One had finished a step that the other had not: without a word they would never meet again."""
    regions = [NodeMemory(), NodeMemory()]
    ranks = [Snapshots(regions, rank, None) for rank in (0, 1)]
    for step in range(1, steps + 1):
        for each in ranks:
            each.take(step, state_at(step), own={1})
    for killed_at in (steps, steps + 4):
        tear(regions[torn], ranks[torn].slot)
        newest = newest_snapshot(regions)
        assert newest is not None and newest.step == killed_at - 1
        ranks = [Snapshots(regions, rank, newest.slot) for rank in (0, 1)]
        for step in range(killed_at, killed_at + 5):
            for each in ranks:
                each.take(step, state_at(step), own={1})
            after = newest_snapshot(regions)
            assert after is not None and after.step == step and same(after.state, state_at(step))


def test_marks_of_a_world_that_nobody_goes_on_from_do_not_meet_new_ones() -> None:
    regions = [NodeMemory(), NodeMemory()]
    old = [Snapshots(regions, rank, None) for rank in (0, 1)]
    for step in (7, 8):
        old[0].take(step, state_at(step), own={1})
    assert newest_snapshot(regions) is None, "rank 1 was killed before its first one"
    new = [Snapshots(regions, rank, None) for rank in (0, 1)]  # they go on from a checkpoint of step 6
    new[0].take(6, state_at(6), own={1})
    for step in (6, 7):
        new[1].take(step, state_at(step), own={1})
    assert (newest_snapshot(regions) or (0,))[0] == 6


def test_a_skeleton_that_outgrows_its_place_changes_no_slot() -> None:
    regions = [NodeMemory(), NodeMemory()]
    ranks = [Snapshots(regions, rank, None) for rank in (0, 1)]
    for step in range(1, 6):
        state = state_at(step)
        state["words"] = "x" * (1000 if step >= 3 else 1)  # rank 0 alone has it in its region
        for each in ranks:
            each.take(step, state, own={1})
        assert (newest_snapshot(regions) or (0,))[0] == step


def test_another_model_begins_anew() -> None:
    regions = [NodeMemory()]
    Snapshots(regions, 0, None).take(9, state_at(9), own=())
    Snapshots(regions, 0, None).take(1, {"model": {"w": torch.ones(2)}}, own=())
    step, state, _ = newest_snapshot(regions) or (0, {}, 0)
    assert step == 1 and torch.equal(state["model"]["w"], torch.ones(2))


def test_own_tensors_are_rank_zeros() -> None:
    regions = [NodeMemory(), NodeMemory()]
    for rank in (0, 1):
        state = state_at(3)
        state["model"]["mean"] += rank  # each rank has running statistics of its own
        Snapshots(regions, rank, None).take(3, state, own={1})
    _, state, _ = newest_snapshot(regions) or (0, {}, 0)
    assert torch.equal(state["model"]["mean"], torch.full((3,), 30.0))


def in_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)  # the parent's threads are not here
        work()
        os._exit(0)
    return pid


@pytest.mark.parametrize("trial", range(int(os.environ.get("TANDEM_TRIALS", "5"))))
def test_a_kill_in_the_middle_costs_one_step_at_most(trial: int) -> None:
    """A child counts steps over a pipe; wherever it is killed, the last counted step or the next is whole."""
    regions = [NodeMemory()]
    read, write = os.pipe()
    big = torch.zeros(300_000)

    def work() -> None:
        snapshots = Snapshots(regions, 0, None)
        for step in range(1, 100_000):
            big.fill_(step)
            snapshots.take(step, {"model": {"w": big}, "step": step}, own=())
            os.write(write, b"x")

    pid = in_child(work)
    done = 0
    for _ in range(20 + 7 * trial):
        done += len(os.read(read, 1))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.set_blocking(read, False)
    try:
        while more := os.read(read, 4096):
            done += len(more)
    except BlockingIOError:
        pass
    step, state, _ = newest_snapshot(regions) or (0, {}, 0)
    assert step in (done, done + 1) and state["step"] == step
    assert bool((state["model"]["w"] == step).all())


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(ConfigError, match="what"):
        Snapshots([NodeMemory()], 0, None).take(1, {"model": {"w": torch.ones(1)}, "what": object()}, own=())


def test_flatten_and_back() -> None:
    skeleton, tensors = flatten(state_at(2))
    assert len(tensors) == 4 and same(unflatten(skeleton, tensors), state_at(2))


def test_memory_is_asked_for_without_pythons_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """MAP_POPULATE held it for a second a GiB: nobody could say where the rank was: a hang."""
    asked: list[tuple[int, int]] = []
    libc = memory_module._libc
    assert isinstance(libc, ctypes.CDLL) and not isinstance(libc, ctypes.PyDLL)  # gives the lock up

    def madvise(address: Any, size: Any, advice: int) -> int:
        asked.append((size.value, advice))
        return int(libc.madvise(address, size, advice))

    monkeypatch.setattr(memory_module, "_libc", SimpleNamespace(madvise=madvise))
    memory = NodeMemory().map(1 << 20)
    assert asked == [(1 << 20, memory_module.POPULATE_WRITE)]
    memory[-1:] = b"x"
    memory.close()  # nothing holds on to it


@pytest.mark.parametrize(("number", "raises"), [(errno.ENOMEM, True), (errno.EINVAL, False)])
def test_memory_that_is_not_there_is_an_error_and_an_old_kernel_is_none(
    number: int, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def madvise(*_: Any) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(memory_module, "_libc", SimpleNamespace(madvise=madvise))
    with pytest.raises(OSError, match="memory") if raises else nullcontext():
        NodeMemory().map(4096)


def test_a_gpus_state_is_copied_into_pinned_memory_and_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mode, notes = played_gpu.play(patch=monkeypatch.setattr)
    regions = [NodeMemory()]
    snapshots = Snapshots(regions, 0, None)
    with mode:
        assert not snapshots.is_laid_out
        for step in (1, 2, 3):
            snapshots.take(step, state_at(step), set())
    assert snapshots.is_laid_out and sum(notes.counts["pinned region"].values()) == 1
    assert notes.counts["wait for a stream"] == {"checkpoint/snapshot.py:_copy": 3}
    assert "wait" not in notes.counts
    found = newest_snapshot(regions)
    assert found is not None and found.step == 3 and same(found.state, state_at(3))


def test_snapshots_that_a_containers_memory_does_not_hold_are_refused_before_they_take_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond the limit of a control group the kernel kills a process, without an error."""
    state = {"weights": torch.ones(2**20), "step": 1}  # 4 MiB: 8 of them for two slots, and 4 for a save
    need = 3 * 4 * 2**20
    monkeypatch.setattr(snapshot_module, "memory_left", lambda root: need - 1)
    regions = [NodeMemory(), NodeMemory()]
    for rank in (0, 1):
        with pytest.raises(OSError, match="--snapshot-every never"):
            Snapshots(regions, rank, None).take(1, state, set())
    assert [region.present() for region in regions] == [0, 0]
    monkeypatch.setattr(snapshot_module, "memory_left", lambda root: need)
    Snapshots(regions, 0, None).take(1, state, set())
    monkeypatch.setattr(snapshot_module, "memory_left", lambda root: need - regions[0].present())
    Snapshots(regions, 1, None).take(1, state, set())
    monkeypatch.setattr(snapshot_module, "memory_left", lambda root: 0)  # a restart has it already
    assert (found := newest_snapshot(regions)) is not None and found.step == 1
    Snapshots(regions, 0, found.slot).take(2, state, set())


def group(folder: str, version: int, limit: object, used: int, cached: int) -> dict[str, str]:
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if version == 1
        else ("memory.max", "memory.current")
    )
    total = "total_" if version == 1 else ""
    stat = f"anon 7\n{total}inactive_file {cached}\n{total}active_file 1\n"
    files = (names[0], str(limit)), (names[1], str(used)), ("memory.stat", stat)
    return {f"sys/fs/cgroup/{folder}{name}": text for name, text in files}


OUTERMOST = {"proc/self/cgroup": "0::/\n"}


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                **group("a/", 2, 1000, 900, 74),
                **group("a/b/", 2, "max", 5, 0),
            },
            175,
        ),
        ({**OUTERMOST, **group("", 2, 1000, 1200, 1)}, 0),
        ({"proc/self/cgroup": "4:memory:/pod\n", **group("memory/pod/", 1, 1000, 600, 29)}, 430),
        (
            {
                **OUTERMOST,
                **group("", 2, "max", 1, 1),
                "proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 2 kB\n",
            },
            2048,
        ),
        ({**OUTERMOST, "sys/fs/cgroup/memory.max": "nonsense"}, None),
        ({}, None),
    ],
)
def test_memory_that_is_left_is_that_of_the_tightest_group(
    files: dict[str, str], left: int | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_left(tmp_path) == left


class Refusing:
    """CUDA's runtime; it keeps its last error, as CUDA does, for the next kernel."""

    def __init__(self, codes: list[int]) -> None:
        self.codes, self.calls = codes, list[tuple[str, int]]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("register", size))
        return self.codes.pop(0)

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


def test_memory_that_cuda_does_not_pin_is_said_once_and_its_error_is_used_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, raised = Refusing([2]), list[object]()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)

    def kernel(*size: int, device: str) -> torch.Tensor:
        raised.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "ones", kernel)
    pinned, memory = Pinned(), torch.zeros(64, dtype=torch.uint8)
    for _ in range(3):
        pinned.hold(memory)
    pinned.release()
    assert runtime.calls == [("register", 64)] and raised == ["cuda"]
    assert len(caplog.messages) == 1 and "ulimit -l" in caplog.messages[0]


def test_memory_of_another_size_at_the_same_address_is_pinned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Refusing([0, 0])
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pinned, memory = Pinned(), torch.zeros(64, dtype=torch.uint8)
    for piece in (memory[:32], memory[:32], memory):
        pinned.hold(piece)
    assert runtime.calls == [("register", 32), ("unregister", memory.data_ptr()), ("register", 64)]
