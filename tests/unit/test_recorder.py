"""What a rank sends becomes metrics: counters that add up, messages that fit, a loss that is no number."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gathered import Here

from tandem.telemetry.channel import MAX_MESSAGE_BYTES
from tandem.telemetry.clock import Clock
from tandem.telemetry.journal import Journal
from tandem.telemetry.messages import Event, Message, Point, Samples, decode, encode
from tandem.telemetry.meter import PHASES, Consensus, Costs, DeviceMemory, Readings, StepTimes
from tandem.telemetry.recorder import Recorder
from tandem.telemetry.registry import Registry
from tandem.telemetry.stragglers import ROW_LENGTH

STEP = StepTimes(0.001, 0.002, 0.003, 0.004, 0.005, 0.0, wait=0.006)


READINGS = Readings(grad_norm=2.0, loss_scale=None, clips=3, hidden_sync_seconds=0.01, memory=None)


class StandingClock(Clock):
    """Every step takes the same time."""

    def end_step(self) -> list[StepTimes]:
        super().end_step()
        return [STEP]


class Wire:
    """Applies what is sent, as the agent would after the datagram."""

    def __init__(self) -> None:
        self.metrics = Registry()
        self.messages: list[Message] = []

    def send(self, message: Any) -> None:
        datagram = encode(message)
        assert len(datagram) <= MAX_MESSAGE_BYTES
        self.messages.append(decode(datagram))
        if isinstance(self.messages[-1], Samples):
            self.metrics.apply(self.messages[-1].samples)

    def value(self, name: str, /, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
def wire() -> Wire:
    return Wire()


def recorder(wire: Wire, journal: Journal | None = None, begin: int = 100) -> Recorder:
    made = Recorder(0, 24, wire.send, StandingClock(), node=0)
    made.begin_run(begin, 50, 1000, journal, None, None)
    made.costs(Costs(1000 / 24, 5e8, 2, 400))
    return made


def train(made: Recorder, steps: int, begin: int = 100) -> None:
    for step in range(begin, begin + steps):
        made.end_step(0.1)
        made.agreed(Consensus(step, 0.5, False, False, 0, {"right": (3.0, 4.0)}))


def test_steps_phases_waits_and_costs_add_up(wire: Wire) -> None:
    made = recorder(wire)
    train(made, 20)
    made.log_interval(120, READINGS, lambda row: Here([row, [1.0] + [0.03] * (ROW_LENGTH - 1)]))
    train(made, 5, 120)
    made.close()
    assert wire.value("tandem_steps_total") == 25 and wire.value("tandem_samples_total") == 25 * 24
    assert wire.value("tandem_step_duration_seconds_count") == 25
    phases = [wire.value("tandem_step_phase_seconds_total", phase=phase) or 0.0 for phase in PHASES]
    total = wire.value("tandem_step_duration_seconds_sum")
    assert sum(phases) == pytest.approx(total) and total == pytest.approx(25 * STEP.total)
    assert wire.value("tandem_gradient_sync_seconds_total", overlap="exposed") == pytest.approx(25 * 0.006)
    assert wire.value("tandem_gradient_sync_seconds_total", overlap="hidden") == pytest.approx(20 * 0.01)
    assert wire.value("tandem_gradient_sync_bytes_total") == 25 * 400
    assert wire.value("tandem_model_flops_total") == 25 * 1000
    assert wire.value("tandem_global_step") == 125 and wire.value("tandem_progress_ratio") == 0.125
    assert wire.value("tandem_grad_clips_total") == 3 and wire.value("tandem_grad_norm") == 2
    assert wire.value("tandem_train_score", score="right") == 0.75
    assert wire.value("tandem_slowest_rank") == 1 and wire.value("tandem_loss", split="train") == 0.5
    assert "tandem_collect_errors_total{" not in wire.metrics.page().decode()


def test_what_the_loss_returns_beside_it_is_a_mean_over_the_interval(wire: Wire, tmp_path: Path) -> None:
    made = recorder(wire, Journal(tmp_path))
    for step in range(100, 110):
        made.end_step(0.1)
        made.agreed(Consensus(step, 0.5, False, False, 0, {"right": (step % 2, 4.0)}))
    made.log_interval(110, READINGS, lambda row: Here([row]))
    made.end_step(0.1)
    made.agreed(Consensus(110, 0.5, False, False, 0, {"right": (4.0, 4.0)}))
    made.log_interval(111, READINGS, lambda row: Here([row]))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["scores"] for line in lines] == [{"right": 0.125}, {"right": 1.0}]
    points = [message.values for message in wire.messages if isinstance(message, Point)]
    assert [point["scores"]["right"] for point in points] == [0.125, 1.0]
    assert wire.value("tandem_train_score", score="right") == 1.0


def test_a_sum_named_tokens_is_a_rate_whatever_its_count(wire: Wire) -> None:
    """Also where the interval was open when a checkpoint was saved: its seconds begin with this process."""
    made = recorder(wire)
    train(made, 2)
    made.log_interval(102, READINGS, lambda row: Here([row]))
    assert wire.value("tandem_tokens_per_second") is None, "nobody has said how many there are"
    made.load({"loss_sum": 1.0, "loss_count": 2, "sums": {"tokens": [8_000.0, 2.0]}})
    for step, count in ((102, 24.0), (103, 1.0)):
        made.end_step(0.1)
        made.agreed(Consensus(step, 0.5, False, False, 0, {"tokens": (600.0, count)}))
    made.log_interval(104, READINGS, lambda row: Here([row]))
    assert wire.value("tandem_tokens_per_second") == pytest.approx(600 / STEP.total)
    made.end_step(0.1)
    made.logged({"tokens": (60.0, 1.0)})  # a loop of one's own
    made.log_interval(105, READINGS, lambda row: Here([row]))
    assert wire.value("tandem_tokens_per_second") == pytest.approx(60 / STEP.total)
    made.end_step(0.1)
    made.log_interval(106, READINGS, lambda row: Here([row]))
    assert wire.value("tandem_tokens_per_second") == 0


def test_tokens_of_all_ranks_are_counted_up_to_the_last_step(wire: Wire) -> None:
    made = recorder(wire)
    train(made, 2)
    made.log_interval(102, READINGS, lambda row: Here([row]))
    assert "tandem_tokens" not in wire.metrics.page().decode(), "nobody has said how many there are"
    made.load({"loss_sum": 1.0, "loss_count": 2, "sums": {"tokens": [8_000.0, 2.0]}})  # counted before
    made.costs(Costs(sums=("tokens",)))
    assert wire.value("tandem_tokens_total") == 0, "rate() needs a beginning"
    for step in (102, 103):
        made.end_step(0.1)
        made.agreed(Consensus(step, 0.5, False, False, 0, {"tokens": (600.0, 24.0)}))
    made.log_interval(104, READINGS, lambda row: Here([row]))
    assert wire.value("tandem_tokens_total") == 1_200
    made.end_step(0.1)
    made.logged({"tokens": (60.0, 1.0)})  # a loop of one's own, and no line after it
    made.close()
    assert wire.value("tandem_tokens_total") == 1_260


def test_an_interval_of_many_steps_fits_its_messages(wire: Wire) -> None:
    made = recorder(wire, begin=0)
    train(made, 20_000, 0)
    made.log_interval(20_000, READINGS, lambda row: Here([row]))
    assert wire.value("tandem_step_duration_seconds_count") == 20_000


def test_the_interval_of_snapshots_is_sent_when_it_changes(wire: Wire) -> None:
    made = recorder(wire)
    before = len(wire.messages)
    for seconds in (0.0, 0.0, 2.5):
        made.snapshots_every(seconds)
    assert len(wire.messages) == before + 2
    assert wire.value("tandem_snapshot_interval_seconds") == 2.5


def test_a_straggler_is_an_event_once(wire: Wire, tmp_path: Path) -> None:
    made = recorder(wire, Journal(tmp_path))
    row = [1.0, 0.03, 0.03, 0.036, 4.0] + [0.03] * len(PHASES)
    for at in range(100, 300, 20):
        train(made, 20, at)
        made.log_interval(at + 20, READINGS, lambda mine: Here([mine, row]))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["rank"], event["node"]) for event in events] == [("straggler", 1, 1)]
    assert len([message for message in wire.messages if isinstance(message, Event)]) == 1


def test_a_loss_that_is_no_number_is_shown_as_one(wire: Wire) -> None:
    made = recorder(wire)
    made.not_finite()
    loss = wire.value("tandem_loss", split="train")
    assert loss is not None and math.isnan(loss)
    assert math.isnan(made.loss)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_remembered_of_steps_is_bounded_without_log_lines(wire: Wire, rank: int) -> None:
    made = Recorder(rank, 24, wire.send, StandingClock(), pause=0.0)  # a message after every step
    made.begin_run(0, 50, 10**6, None, None, None)
    train(made, 3000, 0)
    assert len(made._stragglers._times) <= 1000 and len(made._unsent) <= 1


def test_other_ranks_are_silent_but_for_their_gpu_and_their_errors(wire: Wire) -> None:
    made = Recorder(1, 24, wire.send, StandingClock())
    made.begin_run(0, 50, 1000, None, None, None)
    memory = DeviceMemory(gpu=1, allocated=5, reserved=6, peak=7, retries=2, ooms=0)
    for _ in range(2):
        made.log_interval(0, replace(READINGS, memory=memory), lambda row: Here([]))
    made.data_error("OSError")
    made.event("anything")
    assert wire.value("tandem_torch_memory_peak_bytes", gpu="1", node="0") == 7
    assert wire.value("tandem_torch_alloc_retries_total", node="0") == 2
    assert wire.value("tandem_data_errors_total", reason="OSError", node="0") == 1
    assert wire.value("tandem_global_step") is None
    assert {type(message) for message in wire.messages} == {Samples}


def test_the_loss_of_a_run_that_is_stopped_before_its_first_line_is_that_of_its_steps(wire: Wire) -> None:
    made = recorder(wire)
    assert math.isnan(made.last_loss), "no step was taken"
    train(made, 3)
    assert math.isnan(made.loss) and math.isfinite(made.last_loss)
    made.not_finite()
    assert math.isnan(made.last_loss), "that is why it ends"
