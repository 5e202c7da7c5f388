"""A replica's index by reverse look-up, against a resolver that answers as Docker's does; ends that stay."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.errors import ConfigError
from tandem.platforms import compose
from tandem.platforms.detection import detect

PROJECT = {"TANDEM_COMPOSE_PROJECT": "demo", "TANDEM_COMPOSE_NODES": "12"}


def pointer(name: str, compressed: bool) -> bytes:
    """One PTR record for the question's name; the end of `name` may point into the question."""
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    data = labels + (b"\xc0\x0c" if compressed else b"\0")
    return b"\xc0\x0c" + struct.pack(">HHIH", 12, 1, 600, len(data)) + data


@contextlib.contextmanager
def resolver(*records: bytes, silent: int = 0) -> Iterator[tuple[str, int]]:
    """A UDP server that ignores the first `silent` questions, then answers each with `records`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))

        def answer() -> None:
            with contextlib.suppress(OSError):
                for number in range(silent + 3):
                    question, sender = server.recvfrom(4096)
                    if number >= silent:
                        header = question[:2] + struct.pack(">5H", 0x8180, 1, len(records), 0, 0)
                        server.sendto(header + question[12:] + b"".join(records), sender)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield server.getsockname()


def test_names_of_an_address() -> None:
    with resolver(pointer("demo-node-12.demo_default", False), pointer("4f3c", True)) as address:
        names = compose.names_of("10.0.0.9", address)
    assert names == ["demo-node-12.demo_default", "4f3c.9.0.0.10.in-addr.arpa"]


def record(data: bytes) -> bytes:
    return b"\xc0\x0c" + struct.pack(">HHIH", 12, 1, 600, len(data)) + data


AT_THE_NAME = 12 + len(b"\x019\x010\x010\x0210\x07in-addr\x04arpa\0") + 4 + 12


@pytest.mark.parametrize("answer", [
    record(b"\xc0" + bytes([AT_THE_NAME])), record(b"\x01a\xc0" + bytes([AT_THE_NAME])),
    record(b"\xc0\xff"), record(b"\x3fshort"), record(b"\x02\xff\xfe\0"), b"\xc0\x0c\x00",
], ids=["itself", "round", "behind", "longer than it is", "no text", "cut off"])  # fmt: skip
@pytest.mark.timeout(20)
def test_an_answer_that_is_none_ends(answer: bytes) -> None:
    """A name that points at itself was read for ever."""
    with resolver(answer) as address:
        assert compose.names_of("10.0.0.9", address, seconds=0.1) == []


def test_only_the_resolver_is_heard() -> None:
    """Anybody's datagram was an answer."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger,
    ):
        server.bind(("127.0.0.1", 0))

        def answer() -> None:
            question, sender = server.recvfrom(4096)
            header = question[:2] + struct.pack(">5H", 0x8180, 1, 1, 0, 0)
            for channel, number in ((stranger, 7), (server, 2)):
                said = pointer(f"demo-node-{number}.demo_default", False)
                channel.sendto(header + question[12:] + said, sender)

        threading.Thread(target=answer, daemon=True).start()
        assert compose.names_of("10.0.0.9", server.getsockname()) == ["demo-node-2.demo_default"]


def test_a_lost_question_is_asked_again() -> None:
    with resolver(pointer("demo-node-2.demo_default", False), silent=1) as address:
        assert compose.names_of("10.0.0.9", address, seconds=0.1) == ["demo-node-2.demo_default"]


def test_the_index_makes_a_placement() -> None:
    with resolver(pointer("demo-node-12.demo_default", False)) as address:
        environ = compose.with_index(PROJECT, address)
    placement = detect(environ, "4f3c")
    assert (placement.node_rank, placement.nodes, placement.master_host) == (11, 12, "demo-node-1")


@pytest.mark.parametrize("environ", [{}, {**PROJECT, "TANDEM_COMPOSE_INDEX": "3"}])
def test_nothing_is_asked_where_nothing_is_open(environ: dict[str, str]) -> None:
    assert compose.with_index(environ, ("127.0.0.1", 1)) is environ


@pytest.mark.parametrize("name", ["other-node-1.other_default", "demo-metrics-1.demo_default", "demo-node-x"])
def test_a_container_that_is_no_replica(name: str) -> None:
    with resolver(pointer(name, False)) as address:
        with pytest.raises(ConfigError, match="is not a replica") as error:
            compose.with_index(PROJECT, address)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_a_final_end_keeps_the_container_down_for_a_while(tmp_path: Path) -> None:
    assert compose.permanent_exit_code(tmp_path, "4f3c") is None
    compose.note_end(tmp_path, "4f3c", 7)
    assert compose.permanent_exit_code(tmp_path, "4f3c") == 7
    assert compose.permanent_exit_code(tmp_path, "other") is None
    noted = (tmp_path / "log" / "ended-4f3c.json").stat().st_mtime
    assert compose.permanent_exit_code(tmp_path, "4f3c", noted + compose.STAY_DOWN_SECONDS + 1) is None


@pytest.mark.parametrize("code", [0, 137, 143, 200])
def test_an_end_that_may_be_retried_is_no_reason_to_stay_down(tmp_path: Path, code: int) -> None:
    compose.note_end(tmp_path, "4f3c", 2)
    compose.note_end(tmp_path, "4f3c", code)
    assert compose.permanent_exit_code(tmp_path, "4f3c") is None


@pytest.mark.parametrize("code, final", [(1, True), (127, True), (255, True), (241, True), (139, False)])
def test_an_end_is_final_also_on_a_volume_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, final: bool
) -> None:
    """A file in the place of log/ is as good as a full or a read-only volume, also to root."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log").write_text("")
    for name in ("notes", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(compose, "NOTES", tmp_path / "notes")
    monkeypatch.setattr(compose.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    compose.note_end(tmp_path / "run", "4f3c", code)
    assert compose.permanent_exit_code(tmp_path / "run", "4f3c") == (code if final else None)
    assert compose.permanent_exit_code(tmp_path / "run", "other") is None
    assert not list((tmp_path / "tmp").iterdir()), "the first place that takes it has it"
    compose.note_end(tmp_path / "run", "4f3c", 0)
    assert compose.permanent_exit_code(tmp_path / "run", "4f3c") is None


def test_notes_never_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "NOTES", tmp_path / "none")
    monkeypatch.setattr(compose.tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    file = tmp_path / "file"
    file.write_text("")
    compose.note_end(file, "4f3c", 1)
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "ended-4f3c.json").write_text("{")
    assert compose.permanent_exit_code(tmp_path, "4f3c") is None
