"""Looking inside ranks: what a rank answers, how an agent collects it, and what a refused request says."""

import faulthandler
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from needs import require
from patience import patient
from program_files import program_text
from tandem import cli, layout
from tandem.errors import ConfigError
from tandem.launch.inspection import KEY, LocalRanks, RemoteNodes, _packed, _requests, send_chunks
from tandem.launch.inspection_socket import InspectionSocket
from tandem.launch.recordings import Offset, answer_clock, keep_snapshots, measure_clock
from tandem.report.inspection import memory_text, stacks_text
from tandem.report.traces import merged
from tandem.run.directory import RunDir
from tandem.telemetry import inspection, profiling
from tandem.telemetry.inspection import Answer, Request, handle
from tandem.telemetry.stacks import is_helper, parse_dump, thread_stacks

STACKS = Request("a", "stacks", 1.6, {})
Start = Callable[..., tuple[int, Callable[[int, bytes], bool]]]


def test_the_main_thread_comes_first_with_file_and_line() -> None:
    rows: list[Any] = []
    ask = threading.Thread(target=lambda: rows.extend(thread_stacks()), name="tandem-asks")
    ask.start()
    ask.join()
    assert rows[0]["thread"] == "MainThread"
    assert any(frame[0] == __file__ and frame[2].startswith("test_the_main") for frame in rows[0]["frames"])
    assert not any(row["thread"] == "tandem-asks" for row in rows), "the one who asks is no news"
    assert is_helper({"thread": "tandem-heartbeat"}) and not is_helper(rows[0])


def test_a_dump_of_faulthandler_is_read_with_the_main_thread_first(tmp_path: Path) -> None:
    done = threading.Event()
    waits = threading.Thread(target=done.wait, name="waits")
    waits.start()
    with (tmp_path / "dump").open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        rows = parse_dump(file.read())
    done.set()
    waits.join()
    assert rows[0]["thread"] == "MainThread" and rows[0]["frames"][0][2].startswith("test_a_dump")
    assert any(frame[2] == "wait" for row in rows[1:] for frame in row["frames"])
    assert parse_dump("no dump\n") == []


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A process at the end of an agent's pipe; returns its number and what writes to the pipe."""
    (tmp_path / "child.py").write_text(program_text("inspection_child"))
    started: list[subprocess.Popen[str]] = []
    ours: list[Connection] = []

    def begin(what: str) -> tuple[int, Callable[[int, bytes], bool]]:
        theirs, end = os.pipe()
        words = [sys.executable, str(tmp_path / "child.py"), str(theirs), str(tmp_path), what]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, pass_fds=[theirs])
        os.close(theirs)
        started.append(process)
        pipe = Connection(end, readable=False)
        ours.append(pipe)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"

        def tell(pid: int, message: bytes) -> bool:
            pipe.send_bytes(message)
            return True

        return process.pid, tell

    yield begin
    for process in started:
        process.kill()
        process.wait(timeout=patient(10))
        assert process.stdout is not None
        process.stdout.close()
    for pipe in ours:
        pipe.close()


def collected(ranks: LocalRanks) -> dict[int, Answer]:
    deadline = time.monotonic() + 60
    while not ranks.is_done:
        assert time.monotonic() < deadline
        ranks.poll()
        time.sleep(0.02)
    ranks.finish()
    return ranks.answers


@pytest.mark.parametrize(("what", "line"), [("sleep", 16), ("native", 15)])
def test_a_rank_answers_also_from_native_code(start: Start, tmp_path: Path, what: str, line: int) -> None:
    pid, tell = start(what)
    time.sleep(0.2)  # until it is in native code
    answer = collected(LocalRanks(STACKS, {3: pid}, tell, tmp_path / "answers", tmp_path))[3]
    assert answer.error is None
    frames = answer.facts["threads"][0]["frames"]
    assert frames[0][0].endswith("child.py") and frames[0][1] == line, frames
    assert answer.facts.get("in_c", False) is (what == "native")
    assert list((tmp_path / "answers").iterdir()) == [], "what was read is removed"


def test_a_rank_that_cannot_answer_says_why(start: Start, tmp_path: Path) -> None:
    pid, tell = start("sleep")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(timeout=patient(30))
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)  # a running thread stops a moment after the signal
    answers = collected(LocalRanks(STACKS, {3: pid, 4: gone.pid}, tell, tmp_path / "answers", tmp_path))
    assert "stopped" in str(answers[3].error) and "ended" in str(answers[4].error)


def test_py_spy_adds_native_frames(start: Start, tmp_path: Path) -> None:
    require("py-spy", (Path(sys.executable).parent / "py-spy").exists())
    pid, tell = start("sleep")
    request = Request("a", "stacks", 30.0, {"native": 1.0})
    answer = collected(LocalRanks(request, {3: pid}, tell, tmp_path / "answers", tmp_path))[3]
    note = answer.facts.get("note", "").lower()
    if "ptrace" in note or "permission" in note:
        pytest.skip("this machine lets no process read another")
    frames = answer.facts["threads"][0]["frames"]
    assert any("libc" in file for file, _, _ in frames), answer.facts
    assert any(file.endswith("child.py") and line == 16 for file, line, _ in frames)


NO_REQUESTS = [b"", b"{", b"[]", b"5", b"\xff", b'{"id": 1}', b'{"id": "a", "action": "stacks"}']


@pytest.mark.parametrize("words", NO_REQUESTS)
def test_what_is_no_request_is_dropped(words: bytes) -> None:
    handle(words)
    assert _requests(words) == []


def test_large_answers_travel_in_chunks_and_nonsense_is_no_answer(tmp_path: Path) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    theirs = TCPStore("127.0.0.1", server.port, is_master=False)
    remote = RemoteNodes(server, STACKS, [1, 2], tmp_path)
    noise = os.urandom(2_500_000)
    (tmp_path / "own").write_bytes(noise)
    answers = {5: Answer(5, {"a": 1}, file="own"), 6: Answer(6, error="no")}
    sender = threading.Thread(target=send_chunks, args=(theirs, STACKS, 1, _packed(answers, tmp_path)))
    sender.start()
    server.set(f"{KEY}/a/2/0", ".nonsense")
    deadline = time.monotonic() + 60
    while remote.missing and time.monotonic() < deadline:
        remote.poll()
    sender.join(timeout=patient(30))
    assert remote.answers == {1: [Answer(5, {"a": 1}, file="a-5.file"), answers[6]], 2: []}
    assert (tmp_path / "a-5.file").read_bytes() == noise and not (tmp_path / "own").exists()
    assert server.num_keys() <= 1, "node 0 removes what it has read"  # torch's own key


def test_ranks_at_the_same_place_share_a_block() -> None:
    at = {"node": 0, "node_name": "a", "step": 1200, "phase": "backward", "seconds": 0.3, "waiting": True}
    main = {"thread": "MainThread", "frames": [("x.py", 3, "f")]}
    waits = {**at, "threads": [main, {"thread": "t", "frames": []}]}
    rows = [{**waits, "rank": 0}, {**waits, "rank": 1}, {"rank": 2, "node": 1, "error": "no answer"}]
    text = stacks_text({"answers": [*rows, {"node": 3, "error": "the node did not answer"}]})
    assert text.count("x.py:3 in f") == 1 and "rank 0" in text.split("\n\n")[0]
    assert "step 1,200, backward for 0.3 s, waiting for other ranks" in text
    assert "--all-threads" in text and "node 3\n  the node did not answer" in text
    assert "  t, most" in stacks_text({"answers": rows}, all_threads=True)


def test_the_clock_of_another_node_is_measured_through_the_store() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    theirs = TCPStore("127.0.0.1", server.port, is_master=False)

    def measured(ahead: int) -> Offset | None:
        other = threading.Thread(target=answer_clock, args=(theirs, "a", lambda: time.time_ns() + ahead))
        other.start()
        found = measure_clock(server, "a")
        other.join(timeout=patient(30))
        return found

    shared = measured(0)
    assert shared is not None and shared.ahead == 0, "nodes of one machine"
    late = measured(-3_000_000_000)
    assert late is not None and abs(late.ahead + 3_000_000_000) <= late.uncertainty
    assert server.num_keys() <= 1


def traced(path: Path, base: int, *events: dict[str, Any]) -> str:
    path.write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": list(events)}))
    return str(path)


def test_traces_are_merged_on_node_0s_clock(tmp_path: Path) -> None:
    """Ranks in two containers have the same process numbers, GPUs are numbered from 0 on each node."""
    step = {"ph": "X", "name": "step", "pid": 7, "tid": 7, "ts": 1000.0, "dur": 1.0}
    kernel = {**step, "name": "kernel", "pid": 0, "tid": 7}
    arrow = {"ph": "s", "id": 5, "pid": 7, "tid": 7, "ts": 1000.0, "cat": "f", "name": "f"}
    marks = {"ph": "X", "name": "Spans", "pid": "Spans", "tid": "x", "ts": 1.0}
    named = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}}
    paths = [
        traced(tmp_path / "0", 1_000_000, step, kernel, arrow, marks, named),
        traced(tmp_path / "1", 2_000_000, step, kernel, arrow),
    ]
    parts = [
        {"rank": rank, "node": rank, "node_name": f"n{rank}", "path": paths[rank], "ahead": rank * 400_000}
        for rank in (1, 0)
    ]
    found = merged(parts, {"run": "r"})
    events = [event for event in found["traceEvents"] if event["ph"] != "M"]
    assert [(event["pid"], event["name"], event["ts"]) for event in events if event["ph"] == "X"] == [
        (0, "step", 1000.0),
        (0, "kernel", 1000.0),
        (1, "step", 1600.0),
        (1, "kernel", 1600.0),
    ], "rank 1's base is 1 ms later, and its clock 0.4 ms ahead"
    assert len({event["id"] for event in events if event["ph"] == "s"}) == 2
    assert len({(event["pid"], event["tid"]) for event in events}) == 4
    names = [event["args"].get("name") for event in found["traceEvents"] if event["ph"] == "M"]
    assert "rank 1 on node 1 (n1)" in names and "stream 7" in names
    with pytest.raises(ValueError):
        merged([{**parts[0], "path": traced(tmp_path / "2", 0) and __file__}], {})


class Reports(list[tuple[Any, ...]]):
    def __call__(self, *words: Any) -> None:
        self.append(words)


def test_a_rank_records_whole_steps_and_refuses_a_second_profile(tmp_path: Path) -> None:
    linear = torch.nn.Linear(4, 4)
    first, second, third = Reports(), Reports(), Reports()
    profiling.ask({"first": 3, "steps": 2}, tmp_path / "trace", first)
    profiling.ask({"first": 3, "steps": 2}, tmp_path / "other", second)
    assert second[0][1] == "a profile is being recorded"
    for step in range(1, 8):
        linear(torch.ones(1, 4))
        profiling.step_ended(step)
    deadline = time.monotonic() + 30
    while not first and time.monotonic() < deadline:
        time.sleep(0.01)
    assert first[0][0]["after"] == 3 and first[0][1] is None
    names = [event["name"] for event in json.loads((tmp_path / "trace").read_text())["traceEvents"]]
    assert names.count("aten::linear") == 2
    with torch.profiler.profile():
        profiling.ask({"first": 0, "steps": 2}, tmp_path / "third", third)
        profiling.step_ended(9)
    assert "itself" in third[0][1], "the program's own profile is left alone"
    profiling.ask({"first": 0, "steps": 2}, tmp_path / "third", third)
    profiling.step_ended(10)
    profiling.cancel()
    profiling.step_ended(11)
    profiling.step_ended(12)
    assert len(third) == 1 and not (tmp_path / "third").exists()


def test_memory_shows_tensors_once_and_what_was_allocated_meanwhile(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(300, 401))
    weight.grad = torch.zeros(300, 401)
    view = weight.detach()[:7]
    done = threading.Event()
    kept: list[bytearray] = []

    def allocate() -> None:
        while not done.wait(0.01):
            kept.append(bytearray(100_000))

    other = threading.Thread(target=allocate)
    other.start()
    found = Reports()
    inspection.measure({"seconds": 0.3}, tmp_path / "snapshot", found)
    done.set()
    other.join()
    ((facts, error, file),) = found
    assert error is None and file is None and not tracemalloc.is_tracing() and len(view) == 7
    sizes = [(row["count"], row["bytes"]) for row in facts["tensors"] if "401" in row["shape"]]
    total = sum(size for _, size in sizes)
    assert total == 2 * 300 * 401 * 4, "the weight and its gradient, no view"
    assert any(row["place"].startswith(__file__) and row["bytes"] >= 100_000 for row in facts["lines"])
    text = memory_text({"answers": [{"rank": 0, "node": 0, **facts}, {"node": 1, "error": "no"}]})
    assert "401] on cpu" in text and text.endswith("node 1\n  no")
    gpu = {"gpu": 1, "allocated": 5, "reserved": 6, "peak": 7}
    row = {"rank": 0, "node": 0, "resident_bytes": 1, "gpus": [gpu], "snapshot": "a.pickle"}
    assert "GPU 1, in bytes: allocated 5" in memory_text({"answers": [row]})


def test_a_program_that_traces_its_memory_goes_on_tracing(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        inspection.measure({"seconds": 0.01}, tmp_path / "snapshot", Reports())
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()


def test_snapshots_of_gpus_are_moved_to_the_run(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"snapshot")
    answers = [Answer(3, file="a"), Answer(4, error="no")]
    keep_snapshots(answers, tmp_path, tmp_path / "run")
    assert Path(answers[0].facts["snapshot"]).read_bytes() == b"snapshot" and not (tmp_path / "a").exists()
    assert layout.FOLDERS_OF_NOTES[layout.PROFILE].fullmatch(Path(answers[0].facts["snapshot"]).name)


class _Refusing:
    def ask(self, action: str, options: dict[str, float], is_cancelled: Callable[[], bool]) -> dict[str, Any]:
        if action == "stacks":
            raise ConfigError("the run has no ranks at the moment")
        raise KeyError(action)


def refused(run: Path) -> str:
    with pytest.raises(ConfigError) as error:
        cli.run("stacks", [str(run)], {})
    return str(error.value)


def test_a_refused_request_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert "not a directory" in refused(folder)
    folder.mkdir()
    assert "is not running here" in refused(folder)
    (folder / "summary.json").write_text('{"state": "finished"}')
    assert "has ended" in refused(folder)
    node: Any = SimpleNamespace(
        view=SimpleNamespace(socket_path=tmp_path / "samples.sock"), run=RunDir(folder)
    )
    with InspectionSocket(node, _Refusing()):  # type: ignore[arg-type]
        assert "no ranks at the moment" in refused(folder)
        note = folder / "log" / "inspection.json"
        known = json.loads(note.read_text())
        copy = shutil.copytree(folder, tmp_path / "copy")
        assert "is a copy of a run" in refused(copy), "the run answered for it"
        assert (tmp_path / "inspect.sock").stat().st_mode & 0o077 == 0, "only its user reaches it"
    assert not note.exists() and "has ended" in refused(folder)
    for words, said in (
        ({**known, "host": "elsewhere"}, "node 0 is on elsewhere"),
        ({**known, "host": socket.gethostname(), "process": 2**30}, "not running any more"),
        ({**known, "host": socket.gethostname(), "process": os.getpid()}, "another container"),
    ):
        note.write_text(json.dumps(words))
        assert said in refused(folder)
    note.write_text("[")
    assert "has ended" in refused(folder)
