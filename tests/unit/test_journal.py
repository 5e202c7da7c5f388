import json
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.telemetry import journal as journal_module
from tandem.telemetry.journal import Journal, write_json_atomic


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_and_metrics_are_json_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run")
    journal.event("restart", reason="crash", path=Path("a"))
    journal.metrics(50, loss=float("nan"))
    expected = {"time": 0, "kind": "restart", "reason": "crash", "path": "a"}
    assert lines(journal.events_path)[0] | {"time": 0} == expected
    assert lines(journal.metrics_path)[0] | {"time": 0} == {"time": 0, "step": 50, "loss": "NaN"}


def test_rewind_drops_later_and_torn_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.rewind(1) == 0
    for step in (10, 20, 30):
        journal.metrics(step)
    with journal.metrics_path.open("a") as file:
        file.write('{"step": 2')
    assert journal.rewind(20) == 2
    assert [line["step"] for line in lines(journal.metrics_path)] == [10, 20]
    assert list(tmp_path.iterdir()) == [journal.metrics_path]


def kept_of_all(content: bytes, step: int) -> list[bytes]:
    """What `rewind` keeps, from a parse of the whole file."""
    kept = []
    for line in content.splitlines(keepends=True):
        try:
            if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    return kept


launches = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200)), max_size=12),  # steps on, bytes of a line
        st.binary(max_size=300),  # what the last write left, torn or not
        st.integers(-1, 40),  # where the next launch goes on
    ),
    min_size=1,
    max_size=5,
)


@given(launches, st.integers(1, 200))
def test_rewind_keeps_what_a_parse_of_the_whole_file_keeps(
    runs: list[tuple[list[tuple[int, int]], bytes, int]], block: int
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module, "BLOCK_BYTES", block, raising=False)
        journal, step = Journal(Path(folder)), 0
        for steps, torn, resumed in runs:
            for further, size in steps:
                step += further
                journal.metrics(step, text="x" * size)
            with journal.metrics_path.open("ab") as file:
                file.write(torn)
            before = journal.metrics_path.read_bytes()
            kept = kept_of_all(before, resumed)
            dropped = journal.rewind(resumed)
            assert journal.metrics_path.read_bytes() == b"".join(kept)
            assert dropped == len(before.splitlines()) - len(kept)
            step = max(0, min(step, resumed))


def test_rewind_reads_the_end_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    many = b"".join(b'{"step": %d, "text": "%s"}\n' % (step, b"x" * 100) for step in range(50_000))
    journal.metrics_path.write_bytes(many)
    tracemalloc.start()
    try:
        assert journal.rewind(49_000) == 999
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert many.startswith(journal.metrics_path.read_bytes())
    assert lines(journal.metrics_path)[-1]["step"] == 49_000
    assert peak_bytes < len(many) / 5


def test_a_torn_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.events_path.write_text('{"kind": "sta')
    journal.event("stop")
    assert json.loads(journal.events_path.read_text().splitlines()[1])["kind"] == "stop"


def test_what_cannot_be_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    journal = Journal(tmp_path / "file")
    journal.event("a")
    journal.event("b")
    assert journal.failures == 2 and len(caplog.records) == 1


def test_write_json_atomic_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json_atomic(path, {"a": 1})
    write_json_atomic(path, {"a": float("inf"), "b": (1, {2})})
    assert json.loads(path.read_text()) == {"a": "Infinity", "b": [1, [2]]}
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError):
        write_json_atomic(tmp_path / "none" / "a.json", {})


def test_scores_of_a_step_are_found_at_the_end_alone(tmp_path: Path) -> None:
    """Each recovery parsed the last 4 MiB: the longer a run, the later it went on."""
    journal = Journal(tmp_path)
    assert journal.scores_at(7) == {}
    many = b"".join(b'{"step": %d, "text": "%s"}\n' % (step, b"x" * 100) for step in range(50_000))
    journal.metrics_path.write_bytes(many)
    journal.metrics(50_000, eval={"accuracy": 0.25})
    journal.metrics(50_000, eval={"accuracy": 0.5})
    journal.metrics(50_000, loss=1.0)
    with journal.metrics_path.open("ab") as file:
        file.write(b'{"step": 50001, "loss')
    tracemalloc.start()
    try:
        assert journal.scores_at(50_000) == {"accuracy": 0.5}
        assert journal.scores_at(49_999) == journal.scores_at(60_000) == {}
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < len(many) / 5
