"""The clocks of a step: parts that add up, the wait for others told apart from a rank's own work."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tandem.telemetry import clock as clock_module
from tandem.telemetry.clock import RING_STEPS, STEP_PHASES, Clock


class Work(torch.autograd.Function):
    """Takes its time in backward, and afterwards, as DDP does, waits in a callback queued during it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(0.02)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: time.sleep(0.05))
        return gradient * 2


def test_the_wait_after_the_gradients_is_not_backwards_own_work() -> None:
    clock = Clock()
    x = torch.ones(3, requires_grad=True)
    clock.begin_step()
    time.sleep(0.01)
    for _ in range(2):  # two micro-batches
        clock.enter("transfer")
        clock.enter("forward")
        loss = Work.apply(x).sum()
        clock.enter_backward(loss)
        loss.backward()
    clock.enter("optimizer")
    (times,) = clock.end_step()
    assert clock.drain() == []
    assert 0.1 <= times.wait < times.total
    assert 0.04 <= times.backward and times.backward + times.wait >= 0.14
    assert times.data >= 0.01
    assert sum(times.phases().values()) == pytest.approx(times.total)


class FakeEvent:
    """An event of a device that does a second of work between any two of them."""

    now = 0
    passed = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.now += 1
        self.at = FakeEvent.now

    def query(self) -> bool:
        return self.at <= FakeEvent.passed

    def synchronize(self) -> None:
        FakeEvent.passed = max(FakeEvent.passed, self.at)

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1000.0 * (other.at - self.at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(clock_module, "after_gradients", lambda loss, call: call())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    FakeEvent.now = FakeEvent.passed = 0
    yield


def step(clock: Clock) -> list[Any]:
    clock.begin_step()
    clock.enter("transfer")
    clock.enter("forward")
    clock.enter_backward(torch.zeros(()))
    clock.enter("optimizer")
    return clock.end_step()


def test_the_host_never_waits_for_a_device_that_is_a_few_steps_behind(device: None) -> None:
    clock = Clock()
    clock.measure(torch.device("cuda"))
    assert [step(clock) for _ in range(RING_STEPS)] == [[]] * RING_STEPS
    assert FakeEvent.passed == 0
    (oldest,) = step(clock)  # further behind than the ring is long: now it does
    assert (oldest.data, oldest.forward, oldest.wait, oldest.other) == (1.0, 1.0, 1.0, 0.0)
    assert oldest.total == 6.0
    assert len(clock.drain()) == RING_STEPS and clock.drain() == []


def test_times_come_in_as_the_device_gets_on(device: None) -> None:
    clock = Clock()
    clock.measure(torch.device("cuda"))
    step(clock)
    step(clock)
    FakeEvent.passed = FakeEvent.now
    assert len(step(clock)) == 2


def test_what_a_device_computes_now_is_that_of_the_step_it_is_in(device: None) -> None:
    """Its events: the beginning, then the ends of data, transfer, forward, backward, wait, optimizer."""
    clock = Clock()
    clock.measure(torch.device("cuda", 0))
    clock.resume(40)
    for _ in range(2):
        step(clock)
    clock.begin_step()
    clock.enter("transfer")
    assert clock.kernel() is None, "it may wait for others in a forward pass: nothing is said"
    clock.computes_alone = True
    said = []
    for passed in range(FakeEvent.now + 1):
        FakeEvent.passed = passed
        said.append(clock.kernel())
    first, second = (
        [("forward", done), ("backward", done), None, ("optimizer", done)] for done in (40, 41)
    )
    assert said == [None, None, None, *first, None, None, *second, None, None]


def test_a_wait_that_cannot_be_told_from_backward_is_no_kernel(
    device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_module, "after_gradients", lambda loss, call: None)
    clock = Clock()
    clock.measure(torch.device("cuda", 0))
    clock.computes_alone = True
    step(clock)
    FakeEvent.passed = 4  # up to forward
    assert clock.kernel() is None


def test_a_host_has_no_kernels() -> None:
    clock = Clock()
    clock.computes_alone = True
    clock.begin_step()
    assert clock.kernel() is None


def test_what_is_between_two_steps_belongs_to_none(device: None) -> None:
    clock = Clock()
    clock.measure(torch.device("cuda"))
    step(clock)
    FakeEvent.now += 100  # straight on: the device stood idle for data
    step(clock)
    clock.pause()
    FakeEvent.now += 100  # an evaluation
    step(clock)
    assert [times.data for times in clock.drain()] == [1.0, 101.0, 1.0]


def test_readers_see_what_was_told_once() -> None:
    clock, heard = Clock(), list[str]()
    clock.on_activity = lambda: heard.append(clock.activity)
    clock.resume(40)
    clock.begin("train")
    assert not clock.has_trained and clock.current == "between"
    clock.begin_step()
    clock.enter("transfer")
    before = clock.entered
    clock.enter("transfer")  # the loop and the step both say so
    assert (clock.current, clock.entered) == ("transfer", before)
    clock.end_step()
    assert clock.has_trained and clock.step == 41
    with clock.phase("eval"):
        assert (clock.activity, clock.current) == ("eval", "eval")
    assert (clock.activity, clock.current) == ("train", "between")
    assert heard == ["train", "eval", "train"]


def test_what_is_between_two_steps_makes_no_step_longer() -> None:
    clock = Clock()
    for _ in range(2):
        clock.begin_step()
        clock.end_step()
        with clock.phase("eval"):
            time.sleep(0.2)
    assert clock.longest_step < 0.2


@pytest.mark.slow
def test_a_compilation_in_mid_run_is_a_phase_of_its_own() -> None:
    """A second shape compiles again, for tens of seconds on a GPU: a step's phase had 10 s for it."""
    clock, seen = Clock(), list[str]()

    def backend(graph: Any, _inputs: Any) -> Any:
        seen.append(clock.current)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * 2, backend=backend, dynamic=False)
    clock.begin("train")
    for size in (2, 2, 3):
        clock.begin_step()
        clock.enter("forward")
        before = clock.since
        compiled(torch.ones(size))
        assert clock.current == "forward"
        clock.end_step()
    assert seen == ["forward", "compile"] and "compile" not in STEP_PHASES and clock.since > before
