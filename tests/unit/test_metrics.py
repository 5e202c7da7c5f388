import re

import pytest

from tandem.telemetry.families import FAMILIES, markdown_table, wire_names
from tandem.telemetry.metrics import MAX_SERIES, Metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_page_has_help_for_each_family_and_no_created_series() -> None:
    metrics = Metrics()
    page = metrics.page().decode()
    openmetrics, content_type = metrics.negotiate("application/openmetrics-text;version=1.0.0")
    assert "_created" not in page + openmetrics.decode()
    assert content_type.startswith("application/openmetrics-text")
    assert all(family.help for family in FAMILIES)
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_a_gauge_is_absent_until_it_is_set() -> None:
    metrics = Metrics()
    assert "last_step_timestamp" not in metrics.page().decode()
    assert value(metrics, "tandem_checkpoint_last_success_step") == 0
    metrics.apply({"set": [["tandem_last_step_timestamp_seconds", {}, 5]]})
    assert value(metrics, "tandem_last_step_timestamp_seconds") == 5


def test_known_counter_series_start_at_zero() -> None:
    metrics = Metrics()
    assert value(metrics, "tandem_steps_skipped_total", reason="amp_overflow") == 0
    assert value(metrics, "tandem_restarts_total", reason="hang") == 0


def test_apply_sets_increments_and_observes() -> None:
    metrics = Metrics()
    metrics.apply({
        "set": [["tandem_loss", {"split": "train"}, float("nan")], ["tandem_epoch", None, 2]],
        "inc": [["tandem_steps", {}, 3], ["tandem_steps_total", {}, 4]],
        "observe": [["tandem_step_duration_seconds", {}, [0.002, 0.01]]],
        "info": [["tandem_run_info", {"run": "a", "task": 'b"\n'}]],
        "state": "training",
    })  # fmt: skip
    assert value(metrics, "tandem_steps_total") == 7
    assert value(metrics, "tandem_epoch") == 2
    assert value(metrics, "tandem_step_duration_seconds_count") == 2
    assert value(metrics, "tandem_run_state", tandem_run_state="training") == 1
    assert value(metrics, "tandem_run_state", tandem_run_state="starting") == 0
    page = metrics.page().decode()
    assert 'tandem_loss{split="train"} NaN' in page
    assert 'task="b\\"\\n"' in page
    assert metrics.training_started and metrics.final_since is None
    metrics.apply({"state": "failed"})
    assert metrics.final_since is not None


@pytest.mark.parametrize(("message", "source"), [
    ({"set": [["tandem_nonsense", {}, 1]]}, "name"),
    ({"set": [[["x"], {}, 1]]}, "name"),
    ({"inc": [["tandem_steps", {}, -1]]}, "value"),
    ({"inc": [["tandem_steps", {}, float("nan")]]}, "value"),
    ({"inc": [["tandem_steps", {}, "1"]]}, "value"),
    ({"set": [["tandem_epoch", {}, 10**400]]}, "value"),
    ({"inc": [["tandem_epoch", {}, 1]]}, "kind"),
    ({"set": [["tandem_loss", {}, 1]]}, "labels"),
    ({"set": [["tandem_loss", 5, 1]]}, "labels"),
    ({"inc": [["tandem_restarts", {"reason": "mood"}, 1]]}, "labels"),
    ({"info": [["tandem_run_info", {"colour": "red"}]]}, "labels"),
    ({"set": 5}, "message"),
    ({"set": [5]}, "message"),
    ({"state": "happy"}, "state"),
    ({"state": ["x"]}, "state"),
])  # fmt: skip
def test_what_is_wrong_is_counted_and_the_rest_applies(message: dict[str, object], source: str) -> None:
    metrics = Metrics()
    metrics.apply(message | {"observe": [["tandem_step_duration_seconds", {}, 1]]})
    assert value(metrics, "tandem_collect_errors_total", source=source) == 1
    assert value(metrics, "tandem_step_duration_seconds_count") == 1


def test_a_message_that_is_no_dict_is_counted() -> None:
    metrics = Metrics()
    metrics.apply([1])
    assert value(metrics, "tandem_collect_errors_total", source="message") == 1


def test_series_are_bounded_and_can_be_cleared() -> None:
    metrics = Metrics()
    rows = [["tandem_rank_data_seconds", {"rank": rank, "node": 0}, 1] for rank in range(MAX_SERIES + 3)]
    metrics.apply({"set": rows})
    assert metrics.page().count(b"\ntandem_rank_data_seconds{") == MAX_SERIES
    assert value(metrics, "tandem_collect_errors_total", source="series") == 3
    metrics.apply({"clear": ["tandem_rank_data_seconds"], "set": rows[:2]})
    assert metrics.page().count(b"\ntandem_rank_data_seconds{") == 2


def test_names_on_the_page_are_the_declared_ones() -> None:
    metrics = Metrics()
    for family in FAMILIES:
        labels = {label: (values or ("x",))[0] for label, values in family.labels.items()}
        if family.kind == "gauge":
            metrics.apply({"set": [[family.name, labels, 1]]})
        if family.kind == "counter":
            metrics.apply({"inc": [[family.name, labels, 1]]})
        if family.kind == "info":
            metrics.apply({"info": [[family.name, labels]]})
    names = set(re.findall(r"^(tandem_\w+)", metrics.page().decode(), re.MULTILINE))
    assert names == wire_names()


def test_markdown_table_has_a_row_per_family() -> None:
    table = markdown_table()
    assert table.count("\n") == len(FAMILIES) + 2
    assert "| `tandem_steps_total` | counter |" in table
