"""Addresses of places elsewhere: what a row of SCHEMES brings, and what is refused."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePath

import pytest

from tandem.checkpoint.decision import checkpoints_of
from tandem.checkpoint.storage import _cached_remote, storage_at
from tandem.checkpoint.storage.folder import Folder
from tandem.checkpoint.storage.objects import Objects
from tandem.checkpoint.storage.protocol import Entries, Payload, StorageReader
from tandem.checkpoint.store import CheckpointStore
from tandem.cli import run
from tandem.config import address, resolve
from tandem.config.sources import Given
from tandem.errors import ConfigError
from tandem.run.directory import RunDir

ROOT: list[Path] = []


class Drawer:
    """A storage that is a folder of this test, one for each host."""

    is_atomic = True

    def __init__(self, scheme: str, host: str) -> None:
        self._folder, self._root = Folder(), ROOT[-1] / scheme / host

    def _at(self, path: PurePath) -> Path:
        return self._root.joinpath(*path.parts[2:])

    def list(self, directory: PurePath) -> dict[str, dict[str, int]]:
        return self._folder.list(self._at(directory))

    def open(self, path: PurePath, from_disk: bool = False) -> StorageReader:
        return self._folder.open(self._at(path), from_disk)

    def commit(
        self, target: PurePath, payload: Payload, manifest: Callable[[Entries], bytes], replace: bool
    ) -> int:
        return self._folder.commit(self._at(target), payload, manifest, replace)

    def repair(self, directory: PurePath) -> None:
        self._folder.repair(self._at(directory))

    def rename(self, source: PurePath, target: PurePath) -> None:
        self._folder.rename(self._at(source), self._at(target))

    def remove(self, entries: Sequence[PurePath]) -> None:
        self._folder.remove([self._at(entry) for entry in entries])

    def read(self, path: PurePath) -> bytes | None:
        return self._at(path).read_bytes() if self._at(path).exists() else None

    def write(self, path: PurePath, data: bytes) -> None:
        self._at(path).parent.mkdir(parents=True, exist_ok=True)
        self._at(path).write_bytes(data)

    def create(self, path: PurePath, data: bytes) -> bool:
        if self.read(path) is None:
            self.write(path, data)
        return self.read(path) == data

    def delete(self, directory: PurePath, names: Iterable[str]) -> None:
        for name in names:
            self._at(directory / name).unlink(missing_ok=True)


@pytest.fixture
def drawer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a run on a storage that only its row knows; the machine's own folder is empty."""
    monkeypatch.setitem(address.SCHEMES, "drawer", f"{__name__}:Drawer")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    ROOT.append(tmp_path)
    _cached_remote.cache_clear()
    yield "drawer://desk:21/runs/digits"
    _cached_remote.cache_clear()


def test_a_row_of_the_table_is_all_that_a_new_storage_needs(drawer: str, tmp_path: Path) -> None:
    store = CheckpointStore(address.address(f"{drawer}/checkpoints"))
    store.save(1, b"state", {})
    assert store.steps() == [1] and str(checkpoints_of(Path(drawer)).directory) == f"{drawer}/checkpoints"
    run_dir = RunDir(drawer)
    run_dir.make_folder()
    run_dir.mirror.begin(b"{}")
    (run_dir.folder / "events.jsonl").write_text("{}\n")
    run_dir.push()
    there = tmp_path / "drawer" / "desk:21" / "runs" / "digits"
    names = {path.name for path in there.iterdir()}
    assert names == {"checkpoints", "config.json", "events.jsonl"}


def test_events_that_were_put_aside_since_the_last_copy_are_not_overwritten(drawer: str) -> None:
    run_dir = RunDir(drawer)
    run_dir.make_folder()
    folder, copies, events = run_dir.folder, run_dir.mirror, run_dir.folder / "events.jsonl"
    events.write_text("1\n")
    copies.push()
    events.write_text("1\n2\n")
    events.replace(folder / "events.jsonl.1")
    events.write_text("counted\n")
    copies.begin(b"{}")  # it was killed before the next copy
    assert events.read_text() == "counted\n" and (folder / "events.jsonl.1").read_text() == "1\n2\n"
    copies.push()
    for each in (events, folder / "events.jsonl.1"):
        each.unlink()
    copies.begin(b"{}")  # with an empty disk
    assert events.read_text() == "counted\n" and (folder / "events.jsonl.1").read_text() == "1\n2\n"


def test_the_longer_ledger_counts_because_its_last_lines_are_written_again(drawer: str) -> None:
    run_dir = RunDir(drawer)
    run_dir.make_folder()
    ledger = run_dir.folder / "goodput.jsonl"
    ledger.write_text("old 1\n")
    run_dir.mirror.push()
    ledger.write_text("new 1\nnew 2\n")
    run_dir.mirror.fetch()
    assert ledger.read_text() == "new 1\nnew 2\n"
    run_dir.mirror.push()
    ledger.write_text("one 1\n")  # another machine has added a line
    run_dir.mirror.fetch()
    assert ledger.read_text() == "new 1\nnew 2\n"


def test_the_summary_of_a_complete_run_stays_where_it_lies(drawer: str) -> None:
    run_dir = RunDir(drawer)
    run_dir.make_folder()
    folder, copies = run_dir.folder, run_dir.mirror
    for keeps in (True, False):
        (folder / "summary.json").write_text("{}")
        copies.push()
        copies.begin(b"{}", keeps_summary=keeps)
        assert (folder / "summary.json").exists() == keeps


def test_a_report_of_a_run_that_was_never_on_this_machine(
    drawer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    CheckpointStore(address.address(f"{drawer}/checkpoints")).save(1, b"state", {})
    where = address.address(drawer)
    storage_at(where).write(where / "config.json", json.dumps({"task": "digits"}).encode())  # type: ignore[attr-defined]
    assert run("report", [drawer], {}) == 0
    written = Path(capsys.readouterr().out.strip())
    assert written == RunDir(drawer).folder / "report.html" and b"digits" in written.read_bytes()


def test_a_report_makes_no_folder_for_a_run_that_is_not_there(drawer: str, tmp_path: Path) -> None:
    for place in (drawer, str(tmp_path / "none")):
        with pytest.raises(ConfigError, match="is not a run"):
            run("report", [place], {})
        assert not RunDir(place).folder.exists()


@pytest.mark.parametrize("setting", ["run_dir", "init_from", "resume"])
@pytest.mark.parametrize("text", ["s3://me:secret@bucket/run", "ftp:/me:secret@host:21/run@5"])
def test_a_password_in_an_address_is_refused_and_not_shown(setting: str, text: str) -> None:
    with pytest.raises(ConfigError, match="contains a password") as caught:
        resolve({setting: Given(text, "flag", "--" + setting)}, {}, None)
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
    assert "FSSPEC_" in str(caught.value)


def test_an_unknown_scheme_is_refused_and_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="ftp://host/run; .*s3://, gs://, az://"):
        resolve({"run_dir": Given("ftp://host/run", "flag", "--run-dir")}, {}, None)


def test_what_looks_like_an_address_and_is_none() -> None:
    for text in ("runs/a:b@c/d", "/data/x", "a:/b/c", "~/x", "s3:", "s3://"):
        assert isinstance(address.address(text), Path), text
    assert str(address.address("s3://user@bucket/at:5@6")) == "s3://user@bucket/at:5@6"


@pytest.mark.parametrize(
    ("scheme", "library"), [("az", "adlfs"), ("dropbox", "fsspec .*dropbox")]
)
def test_a_store_whose_library_is_missing_names_it(
    scheme: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is no row of ours was a KeyError."""
    monkeypatch.setitem(sys.modules, "fsspec", None)
    needed = f"{scheme}:// needs a library.*pip install {library}"
    with pytest.raises(ConfigError, match=needed):
        Objects(scheme, "bucket")
