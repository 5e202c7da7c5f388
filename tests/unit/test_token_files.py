"""Token files as datasets: every format gives the same windows, and a wrong file is one line."""

import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import tandem
from tandem.config.slices import DataConfig
from tandem.data import tokens
from tandem.data.fingerprint import changed, data_facts
from tandem.data.kinds import takes_workers, training_data
from tandem.data.sampler import GlobalOrder
from tandem.data.source import BatchReader
from tandem.data.token_files import TokenWindows
from tandem.errors import ConfigError

Texts = list[NDArray[numpy.int64]]


def megatron(path: Path, text: NDArray[numpy.int64], code: int, dtype: str, sequences: int = 3) -> None:
    """As Megatron's IndexedDatasetBuilder writes them: a document for each sequence."""
    parts = numpy.array_split(text.astype(dtype), sequences)
    lengths = numpy.array([len(part) for part in parts], dtype="<i4")
    begins = numpy.concatenate([[0], lengths.cumsum()[:-1]]).astype("<i8") * numpy.dtype(dtype).itemsize
    documents = numpy.arange(sequences + 1, dtype="<i8")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, sequences, len(documents))
    path.with_suffix(".idx").write_bytes(head + lengths.tobytes() + begins.tobytes() + documents.tobytes())
    path.with_suffix(".bin").write_bytes(text.astype(dtype).tobytes())


def raw(dtype: str) -> Callable[[Path, NDArray[numpy.int64]], None]:
    return lambda path, text: text.astype(dtype).tofile(path.with_suffix(".bin"))


WRITERS: dict[str, tuple[Callable[[Path, NDArray[numpy.int64]], None], str, str]] = {
    "nanoGPT, two bytes": (raw("<u2"), "*.bin", "uint16"),
    "nanoGPT, four bytes": (raw("<u4"), "*.bin", "uint32"),
    "Megatron, two bytes": (lambda path, text: megatron(path, text, 8, "<u2"), "*.bin", "uint16"),
    "Megatron, four bytes": (lambda path, text: megatron(path, text, 4, "<i4"), "*.idx", "uint16"),
    "Megatron, both files match": (lambda path, text: megatron(path, text, 8, "<u2"), "train-*", "uint16"),
    "NumPy": (lambda path, text: numpy.save(path.with_suffix(".npy"), text.astype(">i4")), "*.npy", "uint16"),
}


def texts() -> Texts:
    """Three files, of which the second is too short for a window."""
    draw = numpy.random.default_rng(0)
    return [draw.integers(0, 50_000, size) for size in (1_003, 7, 500)]


@pytest.mark.parametrize(("write", "pattern", "dtype"), WRITERS.values(), ids=WRITERS.keys())
def test_each_format_gives_the_same_windows(
    tmp_path: Path, write: Callable[[Path, NDArray[numpy.int64]], None], pattern: str, dtype: str
) -> None:
    for number, text in enumerate(texts()):
        write(tmp_path / f"train-{number}.x", text)
    windows = tokens(tmp_path / pattern, length=10, dtype=dtype)
    expected = [
        text[start : start + 11].tolist()
        for text in texts()
        for start in range(0, len(text) - 10, 10)
    ]
    assert len(windows) == len(expected) == 100 + 49
    inputs, targets = windows.__getitems__(range(len(windows)))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [each[:-1] for each in expected]
    assert targets.tolist() == [each[1:] for each in expected]
    for index in (0, 100, -1):
        assert windows[index][1].tolist() == expected[index][1:]
    for outside in (149, -150):
        with pytest.raises(IndexError):
            windows[outside]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 12))
def test_windows_meet_and_never_cross_a_file(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], length: int
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    for number, size in enumerate(sizes):
        raw("<u2")(folder / f"{number}.bin", 1_000 * number + numpy.arange(size))
    if max(sizes) <= length:
        with pytest.raises(ConfigError, match="length"):
            tokens(folder / "*.bin", length)
        return
    windows = tokens(folder / "*.bin", length)
    seen = [int(token) for index in range(len(windows)) for token in windows[index][1]]
    usable = [(size - 1) // length * length if size else 0 for size in sizes]
    assert seen == [1_000 * number + 1 + place for number, size in enumerate(usable) for place in range(size)]


def test_several_patterns_and_a_file_that_matches_twice(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        raw("<u2")(tmp_path / f"{name}.bin", numpy.full(11, ord(name)))
    windows = tokens([tmp_path / "c.bin", f"{tmp_path}/*.bin"], length=10)
    assert "".join(chr(int(windows[index][0][0])) for index in range(len(windows))) == "cab"


def small(folder: Path) -> TokenWindows:
    for number, text in enumerate(texts()):
        raw("<u2")(folder / f"train-{number}.bin", text)
    return tokens(folder / "*.bin", length=10)


def test_ranks_read_whole_batches_and_each_window_once(tmp_path: Path) -> None:
    windows = small(tmp_path)
    assert not takes_workers(windows, None)
    order = GlobalOrder(len(windows), 12, seed=3)
    ranks = []
    for rank in range(2):
        reader = BatchReader(DataConfig(batch_size=12), 3, rank, 2, None, torch.device("cpu"))
        ranks.append([inputs for ((inputs, _),) in training_data(windows, reader, None).steps(0, 12)])
    for step, parts in enumerate(zip(*ranks, strict=True)):
        expected = windows.__getitems__(order.batch(step)[1])[0]
        assert sorted(torch.cat(parts).tolist()) == sorted(expected.tolist())


def test_a_copy_for_another_process_maps_the_files_again(tmp_path: Path) -> None:
    windows = small(tmp_path)
    first = windows[0][0]
    raw_bytes = pickle.dumps(windows)
    assert len(raw_bytes) < 1_000 and torch.equal(pickle.loads(raw_bytes)[0][0], first)


def test_other_tokens_than_the_checkpoints_show(tmp_path: Path) -> None:
    windows = small(tmp_path)
    order = GlobalOrder(len(windows), 10, 0)
    before = data_facts(windows, order)
    assert changed(before, data_facts(small(tmp_path), order)) == ""
    for number, text in enumerate(texts()):
        raw("<u2")(tmp_path / f"train-{number}.bin", text // 2)
    assert "different samples" in changed(before, data_facts(tokens(tmp_path / "*.bin", 10), order))


def test_the_package_is_an_attribute_of_tandem() -> None:
    assert tandem.__getattr__("data").tokens is tokens


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "an odd number of bytes": (lambda folder: cut(folder / "raw.bin", 199), "raw.bin: expected a multiple"),
    "nothing there": (lambda folder: (folder / "raw.bin").unlink(), "no file matches"),
    "too short": (lambda folder: cut(folder / "raw.bin", 20), "expected at least 11"),
    "empty": (lambda folder: cut(folder / "raw.bin", 0), "has 0 tokens"),
    "another name": (lambda folder: (folder / "raw.bin").rename(folder / "raw.txt"), "raw.txt: unknown"),
    "unreadable": (lambda folder: (folder / "raw.bin").rename(folder / "raw.npy"), "raw.npy: expected an ar"),
    "a float array": (lambda folder: numpy.save(folder / "raw", numpy.ones(99)), "raw.npy.*got float64"),
    "two dimensions": (lambda folder: numpy.save(folder / "raw", numpy.ones((9, 9), int)), r"\(9, 9\)"),
    "objects": (
        lambda folder: numpy.save(folder / "raw", numpy.array([{}, {}]), allow_pickle=True),
        "raw.npy: expected an array",
    ),
    "an index of another kind": (
        lambda folder: (folder / "raw.idx").write_bytes(b"TNTIDX\0\0" * 9),
        "raw.idx: expected .*MMIDIDX",
    ),
    "an index that ends early": (lambda folder: cut(folder / "raw.idx", 70), "raw.idx: expected .* for 3"),
    "an index without a header": (lambda folder: cut(folder / "raw.idx", 5), "raw.idx: expected"),
    "a .bin that ends early": (lambda folder: cut(folder / "raw.bin", 198), "raw.bin: expected 200 bytes"),
    "an index of floats": (
        lambda folder: megatron(folder / "raw", numpy.arange(100), 7, "<f4"),
        "raw.idx: expected version 1 and a type of integers.*type 7",
    ),
}


@pytest.mark.parametrize(("damage", "said"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_file_is_one_line(
    tmp_path: Path, damage: Callable[[Path], object], said: str, request: pytest.FixtureRequest
) -> None:
    if "index" in request.node.name or ".bin that" in request.node.name:
        megatron(tmp_path / "raw", numpy.arange(100), 8, "<u2")
    else:
        raw("<u2")(tmp_path / "raw.bin", numpy.arange(100))
    damage(tmp_path)
    pattern = "raw.npy" if (tmp_path / "raw.npy").exists() else "raw.[bt]*"
    with pytest.raises(ConfigError, match=said) as caught:
        tokens(tmp_path / pattern, length=10)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize("given", [
    {"length": 0}, {"length": "10"}, {"length": 10.5}, {"length": 10, "dtype": "int8"},
])  # fmt: skip
def test_a_wrong_argument_is_one_line(tmp_path: Path, given: dict[str, object]) -> None:
    raw("<u2")(tmp_path / "raw.bin", numpy.arange(100))
    with pytest.raises(ConfigError, match="invalid value"):
        tokens(tmp_path / "raw.bin", **given)  # type: ignore[arg-type]
