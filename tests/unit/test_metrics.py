import json
import re
from typing import Any

import pytest

from tandem.telemetry import metrics
from tandem.telemetry.messages import Heartbeat, Samples, decode, encode, pack_samples, unpack_samples
from tandem.telemetry.metrics import FAMILIES, Counter, Gauge, Info, Sample, markdown_table, wire_names
from tandem.telemetry.registry import MAX_SERIES, Registry


def value(registry: Registry, name: str, **labels: str) -> float | None:
    return registry.registry.get_sample_value(name, labels)


def test_page_has_help_for_each_family_and_no_created_series() -> None:
    registry = Registry()
    page = registry.page().decode()
    openmetrics, content_type = registry.negotiate("application/openmetrics-text;version=1.0.0")
    assert "_created" not in page + openmetrics.decode()
    assert content_type.startswith("application/openmetrics-text")
    assert all(family.help for family in FAMILIES)
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_a_gauge_is_absent_until_it_is_set() -> None:
    registry = Registry()
    assert "last_step_timestamp" not in registry.page().decode()
    assert value(registry, "tandem_checkpoint_last_success_step") == 0
    registry.apply([metrics.LAST_STEP_TIMESTAMP_SECONDS.set(5)])
    assert value(registry, "tandem_last_step_timestamp_seconds") == 5


def test_known_counter_series_start_at_zero() -> None:
    registry = Registry()
    assert value(registry, "tandem_steps_skipped_total", reason="amp_overflow") == 0
    assert value(registry, "tandem_restarts_total", reason="hang") == 0


def test_samples_set_increment_and_observe() -> None:
    registry = Registry()
    message = Samples([
        metrics.LOSS.set(float("nan"), split="train"),
        metrics.EPOCH.set(2),
        metrics.STEPS.inc(3),
        metrics.STEPS.inc(4),
        metrics.STEP_DURATION_SECONDS.observe(0.002, 0.01),
        metrics.RUN_INFO.set(run="a", task='b"\n'),
        metrics.RUN_STATE.enter("training"),
    ])  # fmt: skip
    received = decode(encode(message))
    assert isinstance(received, Samples)
    registry.apply(received.samples)
    assert value(registry, "tandem_steps_total") == 7
    assert value(registry, "tandem_epoch") == 2
    assert value(registry, "tandem_step_duration_seconds_count") == 2
    assert value(registry, "tandem_run_state", tandem_run_state="training") == 1
    assert value(registry, "tandem_run_state", tandem_run_state="starting") == 0
    page = registry.page().decode()
    assert 'tandem_loss{split="train"} NaN' in page
    assert 'task="b\\"\\n"' in page
    assert registry.training_started and registry.final_since is None
    registry.apply([metrics.RUN_STATE.enter("failed")])
    assert registry.final_since is not None


@pytest.mark.parametrize(("sample", "source"), [
    (["tandem_nonsense", {}, 1], "name"),
    ([["x"], {}, 1], "name"),
    (["tandem_steps", {}, -1], "value"),
    (["tandem_steps", {}, float("nan")], "value"),
    (["tandem_steps", {}, "1"], "value"),
    (["tandem_steps", {}, None], "value"),
    (["tandem_epoch", {}, 10**400], "value"),
    (["tandem_epoch", {}, [1, 2]], "value"),
    (["tandem_loss", {}, 1], "labels"),
    (["tandem_loss", 5, 1], "labels"),
    (["tandem_restarts", {"reason": "mood"}, 1], "labels"),
    (["tandem_run_info", {"colour": "red"}, 1], "labels"),
    (5, "message"),
    ([5], "message"),
    (["tandem_run_state", {}, "happy"], "state"),
    (["tandem_run_state", {}, ["x"]], "state"),
])  # fmt: skip
def test_what_is_wrong_is_counted_and_the_rest_applies(sample: Any, source: str) -> None:
    registry = Registry()
    registry.apply([sample, metrics.STEP_DURATION_SECONDS.observe(1)])
    assert value(registry, "tandem_collect_errors_total", source=source) == 1
    assert value(registry, "tandem_step_duration_seconds_count") == 1


def test_series_are_bounded_and_can_be_cleared() -> None:
    registry = Registry()
    rows = [metrics.RANK_DATA_SECONDS.set(1, rank=rank, node=0) for rank in range(MAX_SERIES + 3)]
    registry.apply(rows)
    assert registry.page().count(b"\ntandem_rank_data_seconds{") == MAX_SERIES
    assert value(registry, "tandem_collect_errors_total", source="series") == 3
    registry.apply([metrics.RANK_DATA_SECONDS.clear(), *rows[:2]])
    assert registry.page().count(b"\ntandem_rank_data_seconds{") == 2


def test_names_on_the_page_are_the_declared_ones() -> None:
    registry = Registry()
    for family in FAMILIES:
        labels = {label: (values or ("x",))[0] for label, values in family.labels.items()}
        match family:
            case Gauge():
                registry.apply([family.set(1, **labels)])
            case Counter():
                registry.apply([family.inc(1, **labels)])
            case Info():
                registry.apply([family.set(**labels)])
    names = set(re.findall(r"^(tandem_\w+)", registry.page().decode(), re.MULTILINE))
    assert names == wire_names()


def test_markdown_table_has_a_row_per_family() -> None:
    table = markdown_table()
    assert table.count("\n") == len(FAMILIES) + 2
    assert "| `tandem_steps_total` | counter |" in table


def of_node_one(used: int, errors: int) -> list[Sample]:
    """What node 1 says of itself, as node 0 reads it."""
    there = Registry(node=1)
    there.apply([
        metrics.GPU_MEMORY_USED_BYTES.set(used, gpu=0),
        metrics.DATA_ERRORS.inc(errors, reason="OSError"),
        metrics.STEPS.inc(5),  # not its own to tell
    ])  # fmt: skip
    return unpack_samples(pack_samples(there.node_samples()).encode())


def test_what_another_node_alone_knows_is_shown_with_its_number() -> None:
    here = Registry()
    here.apply([metrics.GPU_MEMORY_USED_BYTES.set(7, gpu=0)])
    for used, errors in ((1, 2), (3, 6), (4, 1)):  # then its agent starts anew
        here.apply_node(1, of_node_one(used, errors))
    assert value(here, "tandem_gpu_memory_used_bytes", gpu="0", node="0") == 7
    assert value(here, "tandem_gpu_memory_used_bytes", gpu="0", node="1") == 4
    assert value(here, "tandem_data_errors_total", reason="OSError", node="1") == 6 + 1
    assert value(here, "tandem_steps_total") == 0
    here.forget_node(1)
    assert value(here, "tandem_gpu_memory_used_bytes", gpu="0", node="1") is None
    assert value(here, "tandem_gpu_memory_used_bytes", gpu="0", node="0") == 7
    here.apply_node(1, of_node_one(9, 1))
    assert value(here, "tandem_gpu_memory_used_bytes", gpu="0", node="1") == 9
    assert "tandem_collect_errors_total{" not in here.page().decode()


@pytest.mark.parametrize("said", [
    b"", b"\xff", b"[1]", b"{}", b"[1,5]", b"[1,[5]]", b"[" * 50_000, b"[1,[]]" + b" " * 2**20,
    json.dumps([1, [["tandem_steps", {}, 9]]]).encode(),
    json.dumps([1, [["tandem_gpu_throttled", {"gpu": 0, "x": 1}, 9]]]).encode(),
    json.dumps([1, [["tandem_gpu_throttled", [], "9"]]]).encode(),
    json.dumps([1, [["tandem_data_errors_total", {"reason": "x"}, -9]]]).encode(),
])  # fmt: skip
def test_a_node_that_says_nonsense_breaks_nothing(said: bytes) -> None:
    here = Registry()
    here.apply_node(1, unpack_samples(said))
    counted = [line for line in here.page().decode().splitlines() if "collect_errors_total{" in line]
    assert counted or said.startswith(b"[1,[]]")
    assert value(here, "tandem_steps_total") == 0


HEARTBEAT = Heartbeat(3, 7, "train", "forward", 0.1, 10.0, 10.0, True, False)


def test_messages_arrive_as_they_were_sent() -> None:
    assert decode(encode(HEARTBEAT)) == HEARTBEAT
    newer = json.loads(encode(HEARTBEAT)) | {"mood": "good"}
    assert decode(json.dumps(newer).encode()) == HEARTBEAT


@pytest.mark.parametrize("change", [
    {"is": "Heart"}, {"is": None},
    {"is": ["x"]}, {"rank": "3"}, {"rank": True}, {"rank": 1.5}, {"phase": None},
    {"quiet": "0"}, {"waiting": 1}, {"trained": None},
])  # fmt: skip
def test_a_message_that_does_not_fit_its_kind_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        decode(json.dumps(json.loads(encode(HEARTBEAT)) | change).encode())
