"""Readers of data in blocks: Parquet, Arrow, large token files."""

import importlib
import pickle
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import tandem
from needs import require
from tandem.config.slices import DataConfig
from tandem.data import arrow, blocks, columns, parquet, parquet_files, token_files, tokens
from tandem.data.arrow_rows import ArrowRows
from tandem.data.block_order import WINDOW, BlockOrder
from tandem.data.blocks import BlockSource
from tandem.data.fetch import whole_fetch
from tandem.data.kinds import evaluation_batches, takes_workers, training_data
from tandem.data.source import BatchReader
from tandem.errors import ConfigError

CPU = torch.device("cpu")


def batches_of(dataset: Any, world_size: int, workers: int = 0, micro: int | None = None) -> list[Any]:
    """The global batches of steps 2 to 7, as nested lists: for each rank's micro-batches in a row."""
    shares = []
    for rank in range(world_size):
        config = DataConfig(batch_size=48, workers=workers, micro_batch_size=micro)
        data = training_data(dataset, BatchReader(config, 3, rank, world_size, None, CPU), None)
        assert isinstance(data.order, BlockOrder)
        shares.append(list(data.steps(2, 8)))
    return [[part for share in shares for part in share[step]] for step in range(6)]


def column(batches: list[Any], name: Any) -> list[list[Any]]:
    return [[value for part in parts for value in part[name].tolist()] for parts in batches]


def hugging_face() -> Any:
    require("datasets", find_spec("datasets") is not None)
    return importlib.import_module("datasets")


def write(folder: Path, rows: int = 3000, files: int = 3, group: int = 70) -> Path:
    """Files with the columns number, half, pair, words, text, image."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    for number, part in enumerate(numpy.array_split(numpy.arange(rows), files)):
        table = pa.table(
            {
                "number": pa.array(part),
                "half": pa.array(part / 2, pa.float32()),
                "pair": pa.FixedSizeListArray.from_arrays(pa.array(numpy.repeat(part, 2)), 2),
                "words": pa.array([list(range(value % 5)) for value in part.tolist()], pa.list_(pa.int32())),
                "text": pa.array([f"row {value}" for value in part.tolist()]),
                "image": pa.array([bytes([value % 256]) * 3 for value in part.tolist()]),
                "maybe": pa.array([None if value % 2 else value for value in part.tolist()]),
            }
        )
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=group)
    return folder


def test_rows_of_parquet_files_have_their_values_in_any_order(tmp_path: Path) -> None:
    rows = parquet(write(tmp_path) / "part-*.parquet")
    assert isinstance(rows, BlockSource) and len(rows) == sum(rows.block_sizes()) == 3000
    assert max(rows.block_sizes()) == 70 and len(rows.block_sizes()) == 45
    found = rows.__getitems__([2999, 0, 70, 1003])
    assert [row["number"] for row in found] == [2999, 0, 70, 1003] and rows[-1]["number"] == 2999
    assert [row["half"] for row in found] == [1499.5, 0, 35, 501.5]
    assert [row["pair"].tolist() for row in found] == [[2999, 2999], [0, 0], [70, 70], [1003, 1003]]
    assert [row["words"].tolist() for row in found] == [[0, 1, 2, 3], [], [], [0, 1, 2]]
    assert [row["text"] for row in found] == ["row 2999", "row 0", "row 70", "row 1003"]
    assert found[3]["image"] == bytes([1003 % 256]) * 3
    assert [row["maybe"] for row in found] == [None, 0, 70, None]
    assert pickle.loads(pickle.dumps(rows))[5]["number"] == 5
    with pytest.raises(IndexError):
        rows[3000]


def test_some_columns_of_several_patterns(tmp_path: Path) -> None:
    write(tmp_path)
    patterns = [tmp_path / "part-2.parquet", str(tmp_path / "part-*.parquet")]
    rows = parquet(patterns, columns=["half", "number"])
    assert list(rows[0]) == ["half", "number"] and rows[0]["number"] == 2000 and len(rows) == 3000
    stored = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert sum(group.size for group in rows.groups) < stored / 3


def test_batches_of_parquet_are_the_same_at_any_world_size(tmp_path: Path) -> None:
    rows = parquet(write(tmp_path) / "part-*.parquet", columns=["number", "pair"])
    assert takes_workers(rows, None)
    wanted = column(batches_of(rows, 1), "number")
    for world_size in (2, 3, 4, 6):
        assert column(batches_of(rows, world_size), "number") == wanted
    for workers, micro in ((2, None), (0, 5), (2, 16)):
        assert column(batches_of(rows, 3, workers, micro), "number") == wanted
    evaluated = evaluation_batches(rows, 1, 3, 100, device=CPU)
    assert torch.cat([batch["number"] for batch in evaluated]).tolist() == list(range(1, 3000, 3))


def test_a_row_group_is_decoded_once_in_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = parquet(write(tmp_path) / "part-*.parquet", columns=["number"])
    decoded: list[int] = []
    decode = parquet_files.ParquetRows._decode
    monkeypatch.setattr(
        parquet_files.ParquetRows, "_decode", lambda self, group: decoded.append(group) or decode(self, group)
    )
    reader = BatchReader(DataConfig(batch_size=60, workers=0), 3, 1, 5, None, CPU)
    data = training_data(rows, reader, None)
    list(data.steps(0, data.order.steps_per_epoch))
    # A fifth of the blocks, and those at the ends of this rank's six lanes.
    assert 9 <= len(decoded) <= 9 + 2 * 6


def test_values_are_those_of_pyarrow_in_any_chunks() -> None:
    pa = pytest.importorskip("pyarrow")
    numbers = list(range(7))
    words = ["", "é", "ab", "abc", "", "x" * 300, "7"]
    lists: list[Any] = [[], [1], [2, 3], [], [4, 5, 6], [7], [8]]
    for kind, values in {
        pa.int8(): numbers,
        pa.uint64(): [2**63 + number for number in numbers],
        pa.float32(): [number / 3 for number in numbers],
        pa.bool_(): [number % 2 == 0 for number in numbers],
        pa.string(): words,
        pa.large_string(): words,
        pa.binary(): [word.encode() for word in words],
        pa.large_binary(): [word.encode() for word in words],
        pa.binary(1): [b"%d" % number for number in numbers],
        pa.list_(pa.int32()): lists,
        pa.large_list(pa.float64()): lists,
        pa.list_(pa.bool_(), 2): [[True, False]] * 7,
        pa.list_(pa.string()): [words[:number] for number in numbers],
        pa.timestamp("us"): numbers,
        pa.struct({"a": pa.int64()}): [{"a": number} for number in numbers],
    }.items():
        for given in (values, [None, *values[1:]], [*values[:6], None]):
            array = pa.array(given, kind)
            for chunks in ([array], [array[:2], array[2:2], array[2:]], [array[1:], array[:1]], [array[3:5]]):
                column = pa.chunked_array(chunks, kind)
                get = columns.getter_of(column, arrays=False)
                found = [get(row) for row in range(len(column))]
                wanted = column.to_pylist()
                assert found == wanted and [*map(type, found)] == [*map(type, wanted)], kind


def test_row_groups_larger_than_the_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = parquet(write(tmp_path) / "part-*.parquet")
    monkeypatch.setattr(parquet_files, "memory_left", lambda root: 10_000)
    with pytest.raises(ConfigError, match="row_group_size"):
        batches_of(rows, 1, workers=2)


def broken_file(folder: Path) -> None:
    (folder / "part-1.parquet").write_bytes(b"PAR1 no more")


def other_column(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"number": [1.5]}), folder / "part-9.parquet")


@pytest.mark.parametrize(
    ("change", "columns", "word"),
    [
        (broken_file, None, "part-1.parquet"),
        (other_column, ["number"], "part-9.parquet"),
        (lambda folder: None, ["nobody"], "nobody"),
        (lambda folder: [file.unlink() for file in folder.iterdir()], None, "no file"),
    ],
)
def test_a_wrong_parquet_file_is_one_line(tmp_path: Path, change: Any, columns: Any, word: str) -> None:
    change(write(tmp_path))
    with pytest.raises(ConfigError, match=word) as raised:
        parquet(tmp_path / "part-*.parquet", columns)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("columns", ["number", "", []])
def test_columns_are_a_list_of_names(tmp_path: Path, columns: Any) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match="columns: invalid value"):
        parquet(tmp_path / "part-*.parquet", columns)


@pytest.mark.parametrize("reader", [parquet, lambda files: tokens(files, length=10)])
def test_an_empty_list_of_files_is_one_line(reader: Any) -> None:
    with pytest.raises(ConfigError, match="files: got an empty list"):
        reader([])


def test_parquet_files_without_rows_are_refused(tmp_path: Path) -> None:
    write(tmp_path, rows=0, files=1)
    with pytest.raises(ConfigError, match="no rows"):
        parquet(tmp_path / "part-0.parquet")


def test_without_pyarrow_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="pip install"):
        parquet("part-*.parquet")


def test_rows_of_a_hugging_face_dataset_are_ordered_by_blocks(tmp_path: Path) -> None:
    datasets = hugging_face()
    write(tmp_path)
    made = datasets.Dataset.from_parquet(
        [str(path) for path in sorted(tmp_path.glob("*.parquet"))], cache_dir=str(tmp_path / "cache")
    )
    rows = arrow(made.select_columns(["number", "pair"]).with_format("torch"))
    assert isinstance(rows, BlockSource) and rows.block_sizes() == [1000, 1000, 1000]
    wanted = column(batches_of(rows, 1), "number")
    assert len({number for step in wanted for number in step}) == 6 * 48
    for world_size, workers in ((2, 0), (3, 2)):
        assert column(batches_of(rows, world_size, workers), "number") == wanted
    with pytest.raises(ConfigError, match="streaming"):
        arrow(made.to_iterable_dataset())
    with pytest.raises(ConfigError, match="train"):
        arrow(datasets.DatasetDict(train=made))


def is_equal(found: Any, wanted: Any) -> bool:
    """Compare samples and the types of all values in them."""
    if type(found) is not type(wanted):
        return False
    if isinstance(found, dict):
        return list(found) == list(wanted) and all(is_equal(found[key], wanted[key]) for key in found)
    if isinstance(found, list):
        return len(found) == len(wanted) and all(map(is_equal, found, wanted))
    return bool(numpy.array_equal(found, wanted))


def twice(batch: Any) -> Any:
    return {"twice": [2 * number for number in batch["number"]]}


def check_epoch(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are those of the dataset, and each record batch is looked up once."""
    viewed: list[int] = []
    view = ArrowRows._view
    monkeypatch.setattr(ArrowRows, "_view", lambda self, batch: viewed.append(batch) or view(self, batch))
    rows = arrow(dataset)
    rows.hold(3, 1)
    rows = pickle.loads(pickle.dumps(rows))  # as for a loader process, which has to keep as many
    shuffled = torch.randperm(len(dataset)).tolist()
    for start in range(0, len(dataset), 64):
        some = shuffled[start : start + 64]
        assert is_equal(rows.__getitems__(some), dataset.__getitems__(some))
    monkeypatch.undo()
    assert sorted(viewed) == list(range(len(dataset.data.to_batches())))


def test_samples_of_a_hugging_face_dataset_are_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = hugging_face()
    write(tmp_path)
    paths = [str(path) for path in sorted(tmp_path.glob("*.parquet"))]
    made = datasets.Dataset.from_parquet(paths, cache_dir=str(tmp_path / "cache"))
    check_epoch(made, monkeypatch)
    check_epoch(made.select(range(1, len(made))), monkeypatch)
    images = made.add_column("picture", [{"bytes": None, "path": "a"}] * len(made))
    some = [7, 2, 899]
    for changed in (
        made.with_format("numpy", columns=["number", "half"]),
        made.with_format("numpy", columns=["number"], output_all_columns=True),
        made.with_format(None, columns=["text", "number"]),
        made.with_transform(twice),
        made.select([5, 3, 4] * 300),
        images.cast_column("picture", datasets.Image(decode=False)),
    ):
        rows = pickle.loads(pickle.dumps(arrow(changed)))
        assert is_equal(rows.__getitems__(some), changed.__getitems__(some))
    rows = arrow(made)
    made.set_format("numpy", columns=["number"])
    assert is_equal(rows.__getitems__([2]), made.__getitems__([2]))


class Rows(list[Any]):
    """As a datasets.Dataset: one index, or several at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def test_any_map_style_rows_can_be_ordered_by_ranges(caplog: pytest.LogCaptureFixture) -> None:
    rows = arrow(Rows(range(2500)))
    assert isinstance(rows, BlockSource) and rows.block_sizes() == [1000, 1000, 500] and rows[7] == 7
    flat = [[int(index) for part in parts for index in part] for parts in batches_of(rows, 2)]
    assert len({index for step in flat for index in step}) == 6 * 48
    shuffled = Rows(range(5))
    shuffled._indices = [3]  # type: ignore[attr-defined]
    arrow(shuffled)
    assert "flatten_indices" in caplog.text
    for wrong in (Rows(), iter([]), {"train": rows}):
        with pytest.raises(ConfigError):
            arrow(wrong)


def test_large_token_files_are_read_by_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "MANY_WINDOWS", 1000)
    monkeypatch.setattr(token_files, "BLOCK_SAMPLES", 50)
    for name, length in (("a", 4_011), ("b", 3), ("c", 3_215)):
        (numpy.arange(length) + ord(name) * 400).astype("<u2").tofile(tmp_path / f"{name}.bin")
    windows = tokens(tmp_path / "*.bin", length=4)
    assert isinstance(windows, BlockSource) and not takes_workers(windows, None)
    # No block crosses the end of a file.
    assert windows.block_sizes() == [50] * 20 + [2] + [50] * 16 + [3]
    assert windows._bytes_of(19) == (tmp_path / "a.bin", 19 * 400, 400)
    assert windows._bytes_of(22) == (tmp_path / "c.bin", 400, 400)
    windows.will_need([0, 37])
    wanted = column(batches_of(windows, 1), 0)
    for world_size, micro in ((2, None), (3, 7), (6, None)):
        assert column(batches_of(windows, world_size, 0, micro), 0) == wanted
    assert whole_fetch(windows) is not None


def test_small_token_files_keep_their_order(tmp_path: Path) -> None:
    numpy.arange(4_000).astype("<u2").tofile(tmp_path / "a.bin")
    assert not hasattr(tokens(tmp_path / "a.bin", length=4), "block_sizes")


def test_blocks_that_are_too_much_for_the_kernel_are_cut_off(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    asked = []

    def parts() -> Any:
        for number in range(10):
            asked.append(number)
            yield tmp_path / ("a" if number else "missing"), 0, 2**27

    blocks.read_ahead(parts())
    assert asked == [0, 1, 2]


def test_the_readers_are_attributes_of_the_package() -> None:
    assert (tandem.data.parquet, tandem.data.arrow) == (parquet, arrow)
    with pytest.raises(AttributeError):
        _ = tandem.data.nothing
    assert WINDOW > 1
