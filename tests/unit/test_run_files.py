"""The reader of run directories: regular files alone, through no link, typed and bounded."""

import errno
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patience import patient
from tandem.bounded_reader import (
    LINE_BYTES,
    MOST_STRAY_LINES,
    RECORD_BYTES,
    RunFiles,
    content,
    descriptor,
    number,
    opened,
    parsed,
    text,
)


def written(folder: Path, name: str, value: object) -> RunFiles:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return RunFiles(folder)


def test_a_whole_file_is_read_as_it_is(tmp_path: Path) -> None:
    summary = {
        "state": "finished",
        "eval": {"accuracy": 0.5},
        "global_step": 5,
        "more": [1, None],
        "loss": None,
    }
    files = written(tmp_path, "summary.json", summary)
    assert files.read("summary.json") == summary
    assert RunFiles(tmp_path).read("about.json") == {} and files.problems == []


def link(path: Path) -> None:
    path.symlink_to(path.with_name("outside.json"))


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def too_large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("put", [link, loop, device, os.mkfifo, Path.mkdir, too_large])
@pytest.mark.timeout(20)
def test_what_is_not_a_small_regular_file_is_a_problem(tmp_path: Path, put: Callable[[Path], None]) -> None:
    (tmp_path / "outside.json").write_text('{"state": "canary"}')
    put(tmp_path / "summary.json")
    files = RunFiles(tmp_path)
    assert files.read("summary.json") == {} and len(files.problems) == 1
    assert "summary.json" in files.problems[0] and "\n" not in files.problems[0]


def test_no_folder_below_is_a_link_but_the_named_one_may_be(tmp_path: Path) -> None:
    (tmp_path / "run" / "log").mkdir(parents=True)
    (tmp_path / "run" / "log" / "rank-0.log").write_bytes(b"words")
    (tmp_path / "latest").symlink_to("run")
    with opened(tmp_path / "latest", "log/rank-0.log") as file:
        assert file.read() == b"words"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "log").symlink_to(tmp_path / "run" / "log")
    with pytest.raises(OSError, match="log is a link") as caught:
        descriptor(tmp_path / "other", "log/rank-0.log")
    assert caught.value.errno == errno.EBADMSG
    with pytest.raises(FileNotFoundError):
        descriptor(tmp_path / "run", "log/rank-1.log")
    with pytest.raises(OSError, match="more than"):
        (tmp_path / "run" / "large").write_bytes(bytes(RECORD_BYTES + 1))
        content(tmp_path / "run", "large")


@pytest.mark.parametrize(
    "value",
    [
        "",
        "[]",
        "null",
        "{",
        "[" * 100_000,
        '{"a":' * 100_000,
        "[" + "0," * 300_000 + "0]",
        '{"a": ' + "9" * 5000 + "}",
    ],
)
def test_what_is_no_object_within_the_limits_is_a_problem(tmp_path: Path, value: str) -> None:
    files = written(tmp_path, "config.json", value)
    assert files.read("config.json") == {} and len(files.problems) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("state", 5),
        ("state", ["finished"]),
        ("eval", [0.5]),
        ("global_step", "5"),
        ("global_step", -1),
        ("global_step", True),
        ("global_step", 10**30),
        ("global_step", 1.5),
        ("loss", "low"),
        ("loss", {"x": 1}),
        ("world_size", float("nan")),
    ],
)
def test_a_value_of_another_type_is_left_out_and_named(tmp_path: Path, field: str, value: object) -> None:
    files = written(tmp_path, "summary.json", {"task": "digits", field: value})
    assert files.read("summary.json") == {"task": "digits"}
    assert field in files.problems[0]


def test_numbers_that_are_not_finite_are_numbers(tmp_path: Path) -> None:
    scores = {
        "a": "NaN",
        "b": "Infinity",
        "c": "-Infinity",
        "d": float("nan"),
        "e": 10**400,
        "f": "high",
        "g": 1,
    }
    found = written(tmp_path, "summary.json", {"eval": scores}).read("summary.json")["eval"]
    assert math.isnan(found["a"]) and math.isnan(found["d"]) and found["g"] == 1
    assert (found["b"], found["c"]) == (math.inf, -math.inf) and "e" not in found and "f" not in found
    assert number(2**70) == 2.0**70


def test_text_can_be_printed(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_bytes(
        b'{"state": "a\xff\xfeb", "reason": "\\ud800", "\\udfff": "\\udc00"}'
    )
    for value in RunFiles(tmp_path).read("summary.json").items():
        for each in value:
            each.encode()
    assert text("\ud800") == "?" and len(text("x" * 10**6)) < 10**5


def test_a_null_is_missing_except_where_a_field_is_required(tmp_path: Path) -> None:
    written(tmp_path, "events.jsonl", '{"kind": null}\n{"kind": "world", "nodes": null}\n{"time": 1}\n')
    assert list(RunFiles(tmp_path).events()) == [{"kind": "world", "nodes": None}]


def test_lines_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    lines = [b'{"step": 1, "loss": 0.5, "words": "x"}', b"junk", b'{"step": "2"}', b'{"step": 3', b"[1]", b""]
    lines += [
        b'{"step": 4, "x": "' + b"x" * LINE_BYTES + b'"}',
        b'{"step": 5, "eval": {"a": "NaN", "b": []}}',
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    files = RunFiles(tmp_path)
    found: list[dict[str, Any]] = list(files.lines("metrics.jsonl"))
    assert [record["step"] for record in found] == [1, 5] and found[0] == {"step": 1, "loss": 0.5}
    assert list(found[1]["eval"]) == ["a"] and files.problems == []
    (tmp_path / "metrics.jsonl").write_bytes(b"xy\n" * (MOST_STRAY_LINES + 1000))
    assert list(files.lines("metrics.jsonl")) == [] and "metrics.jsonl" in files.problems[0]


def test_integers_stay_what_they_are_and_depth_has_a_limit() -> None:
    assert parsed(b'{"a": 9007199254740993}') == {"a": 9007199254740993}
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    with pytest.raises(ValueError, match="deep"):
        parsed(json.dumps(deep).encode())


def test_commands_that_only_read_import_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from tandem.cli import run; "
        f"run('runs', [{str(tmp_path)!r}], {{}}); import tandem.report.report, tandem.report.tracking; "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(100))
    assert done.stdout.splitlines()[-1] == "False", done.stderr
