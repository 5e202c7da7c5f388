"""Documents of token files packed into samples: each token once, as few documents cut as possible."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from tandem.config.slices import DataConfig
from tandem.data import mix, token_files, tokens
from tandem.data.blocks import BlockSource
from tandem.data.fingerprint import changed, data_facts
from tandem.data.kinds import takes_workers, training_data
from tandem.data.source import BatchReader, TrainingData
from tandem.data.token_files import IGNORED, PackedTokens
from tandem.data.token_packing import packed
from tandem.errors import ConfigError

END = 0

# The packing of one block.


def block_of(lengths: Sequence[int], rows: int, length: int) -> NDArray[numpy.uint16]:
    """Documents of these lengths, as many as fit into the rows; the last one goes on behind the block."""
    block = numpy.arange(1, rows * length + 1, dtype=numpy.uint16)
    ends = numpy.cumsum(lengths)
    block[ends[ends <= len(block)] - 1] = END
    return block


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@given(LENGTHS, st.integers(1, 12), st.integers(1, 16))
def test_every_token_of_a_block_is_in_one_place_and_every_row_is_full(
    lengths: list[int], rows: int, length: int
) -> None:
    block = block_of(lengths, rows, length)
    packing = packed(block, END, length)
    of_pieces = zip(packing.starts.tolist(), packing.lengths.tolist(), strict=True)
    pieces = [range(start, start + size) for start, size in of_pieces]
    assert sorted(place for piece in pieces for place in piece) == list(range(len(block)))
    assert len(packing.rows) == rows + 1 and packing.rows[0] == 0 and packing.rows[-1] == len(pieces)
    for row in range(rows):
        own = pieces[packing.rows[row] : packing.rows[row + 1]]
        assert sum(map(len, own)) == length
        assert [piece.start for piece in own] == sorted(piece.start for piece in own)
        for piece in own:
            assert END not in block[piece[:-1]].tolist(), "no piece goes over the end of a document"
        for before, after in zip(own, own[1:], strict=False):
            # Else their tokens would be one document to attention, without the tokens between.
            assert END in block[before[-1] : after[0]].tolist(), "two pieces of a document"


def cut_documents(block: NDArray[Any], length: int) -> int:
    """The documents that the packing of a block has in more pieces than their length needs."""
    packing = packed(block, END, length)
    ends = numpy.flatnonzero(block == END) + 1
    of_document = numpy.bincount(numpy.searchsorted(ends, packing.starts, side="right"))
    borders = numpy.unique([0, *ends, len(block)])
    return int((of_document > -(-numpy.diff(borders) // length)).sum())


@pytest.mark.parametrize(
    ("lengths", "rows", "cut"),
    [
        ([6, 4, 7, 3, 5, 5], 3, 0),  # they fill three rows exactly
        ([10, 10, 10], 3, 0),
        ([25, 5], 3, 0),  # two full pieces, and the rest next to the other
        ([6, 6, 6, 6, 6], 3, 2),  # three in whole; the fourth and fifth fill their gaps of 4
        ([1] * 30, 3, 0),
    ],
)
def test_documents_that_can_be_whole_are(lengths: list[int], rows: int, cut: int) -> None:
    assert cut_documents(block_of(lengths, rows, 10), 10) == cut


def test_far_fewer_documents_are_cut_than_by_windows() -> None:
    draw = numpy.random.default_rng(0)
    lengths = numpy.maximum(1, draw.lognormal(5.0, 1.0, 400).astype(int))
    block = block_of(lengths, 64, 512)
    ends = numpy.flatnonzero(block == END) + 1
    borders = numpy.arange(512, len(block), 512)
    by_windows = len(numpy.unique(numpy.searchsorted(ends, borders[~numpy.isin(borders, ends)], "right")))
    assert cut_documents(block, 512) < by_windows / 3


# The dataset.


def write(path: Path, sizes: Sequence[int], documents: NDArray[Any], dtype: str = "<u4") -> list[list[int]]:
    """Files of these sizes, whose tokens are all different but for the ends of documents; return them."""
    texts = []
    for number, size in enumerate(sizes):
        text = 100_000 * (number + 1) + numpy.arange(size)
        ends = numpy.cumsum(numpy.roll(documents, number)) - 1
        text[ends[ends < size]] = END
        text.astype(dtype).tofile(path / f"train-{number}.bin")
        texts.append([int(token) for token in text])
    return texts


def next_in_document(texts: list[list[int]], usable: list[int]) -> dict[int, int]:
    """{token: the next token of its document} of all tokens that are in samples, but not the ends."""
    return {
        text[place]: text[place + 1]
        for text, size in zip(texts, usable, strict=True)
        for place in range(size)
        if text[place] != END
    }


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=3),
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
    st.integers(1, 20),
    st.integers(1, 5),
)
def test_an_epoch_has_every_token_once_with_the_next_one_of_its_document(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    documents: list[int],
    length: int,
    packed_samples: int,
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    texts = write(folder, sizes, numpy.array(documents * 300))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "PACKED_SAMPLES", packed_samples)
        patch.setattr(token_files, "FEWEST_PACKED", 1)
        try:
            data = tokens(folder / "*.bin", length, "uint32", end_of_document=END)
        except ConfigError as error:
            first = next((text for text in texts if len(text) > length), None)
            assert (first is None and "longest" in str(error)) or (first is not None and END not in first)
            return
    assert isinstance(data, PackedTokens) and isinstance(data, BlockSource)
    usable = [max(0, size - 1) // length * length for size in sizes]
    assert sum(data.block_sizes()) == len(data) == sum(usable) // length
    assert max(data.block_sizes()) <= packed_samples
    assert data.left_out == sum(sizes) - sum(usable), "what is in no sample is counted"
    inputs, targets, of_document = data.__getitems__(range(len(data)))
    assert inputs.dtype == targets.dtype == of_document.dtype == torch.int64
    all_tokens = [token for text, size in zip(texts, usable, strict=True) for token in text[:size]]
    assert sorted(inputs.flatten().tolist()) == sorted(all_tokens)
    pairs = dict(zip(inputs.flatten().tolist(), targets.flatten().tolist(), strict=True))
    assert pairs.pop(END, IGNORED) == IGNORED
    assert pairs == next_in_document(texts, usable)
    assert (of_document[:, 0] == 0).all() and set(of_document.diff().flatten().tolist()) <= {0, 1}
    # Within a document, a token is followed by its target; where the number changes, another document begins.
    same = of_document[:, 1:] == of_document[:, :-1]
    assert (inputs[:, 1:] == targets[:, :-1])[same].all()
    assert ((inputs[:, 1:] != targets[:, :-1]) | (inputs[:, 1:] == END))[~same].all()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files for 60 and 30 samples of 16 tokens; documents of 1 to 30 tokens."""
    write(tmp_path, [60 * 16 + 9, 30 * 16 + 3], numpy.random.default_rng(1).integers(1, 31, 120))
    return tmp_path


def small(folder: Path) -> PackedTokens:
    """The samples of the files, in blocks of 10."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "PACKED_SAMPLES", 10)
        patch.setattr(token_files, "FEWEST_PACKED", 1)
        data = tokens(folder / "*.bin", 16, "uint32", end_of_document=END)
    assert isinstance(data, PackedTokens)
    return data


def data_of(data: PackedTokens, rank: int, world_size: int, micro: int | None = None) -> TrainingData:
    config = DataConfig(batch_size=12, micro_batch_size=micro)
    return training_data(data, BatchReader(config, 3, rank, world_size, None, torch.device("cpu")), None)


def global_batches(
    folder: Path, world_size: int, start: int, stop: int, micro: int | None = None
) -> list[list[Tensor]]:
    """The parts of each global batch, put together from the ranks'; each rank has its own dataset."""
    ranks = [
        [
            [torch.cat([micro_batch[part] for micro_batch in step]) for part in range(3)]
            for step in data_of(small(folder), rank, world_size, micro).steps(start, stop)
        ]
        for rank in range(world_size)
    ]
    steps = zip(*ranks, strict=True)
    return [[torch.cat(parts) for parts in zip(*of_ranks, strict=True)] for of_ranks in steps]


def equal(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b)
        for parts, others in zip(one, other, strict=True)
        for a, b in zip(parts, others, strict=True)
    )


STEPS = 17
"""Two epochs and a part of the third."""


@pytest.mark.parametrize(("world_size", "micro"), [(1, 5), (2, None), (2, 3), (3, None), (3, 1), (4, 2)])
def test_global_batches_are_the_same_with_any_number_of_ranks_and_from_any_step(
    folder: Path, world_size: int, micro: int | None
) -> None:
    wanted = global_batches(folder, 1, 0, STEPS)
    assert equal(global_batches(folder, world_size, 0, STEPS, micro), wanted)
    for start in range(1, STEPS):
        stop = min(start + 3, STEPS)
        assert equal(global_batches(folder, world_size, start, stop, micro), wanted[start:stop]), start


def test_an_epoch_of_ranks_has_each_sample_once(folder: Path) -> None:
    data = small(folder)
    steps = len(data) // 12
    seen = torch.cat([inputs for inputs, _, _ in global_batches(folder, 2, 0, steps)])
    rows = {tuple(row) for row in seen.tolist()}
    assert len(rows) == 12 * steps
    assert rows <= {tuple(row) for row in data.__getitems__(range(len(data)))[0].tolist()}
    assert not takes_workers(data, None)


def test_few_packings_are_kept_and_any_order_of_reads_gives_the_same(folder: Path) -> None:
    data = small(folder)
    wanted = data.__getitems__(range(len(data)))
    assert len(data.block_sizes()) == 9 and len(data._packings) == 8, "reads in order need one"
    again = small(folder)
    for index in numpy.random.default_rng(0).permutation(len(data)).tolist():
        found = again[index]
        assert all(torch.equal(one, part[index]) for one, part in zip(found, wanted, strict=True))
        assert len(again._packings) <= 8
    copy = pickle.loads(pickle.dumps(again))
    assert not copy._packings and torch.equal(copy[-1][0], wanted[0][-1])
    for outside in (len(data), -len(data) - 1):
        with pytest.raises(IndexError):
            data[outside]


def test_training_keeps_the_packings_of_all_blocks_that_it_reads_from_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def counted(*of: Any) -> Any:
        made.append(of)
        return packed(*of)

    monkeypatch.setattr(token_files, "packed", counted)
    monkeypatch.setattr(token_files, "PACKINGS", 1)
    data = small(folder)
    epoch = len(data) // 12
    list(data_of(data, 0, 1).steps(0, epoch))
    assert len(made) == len(data.block_sizes()) == 9, "each block was packed once"


def test_the_packing_of_a_block_reads_nothing_else(folder: Path) -> None:
    data = small(folder)
    before = data.__getitems__(range(10, 20))
    raw = numpy.fromfile(folder / "train-0.bin", dtype="<u4")
    raw[: 10 * 16] = END
    raw[20 * 16 + 1 :] = END
    raw.tofile(folder / "train-0.bin")
    after = small(folder).__getitems__(range(10, 20))
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_long_samples_are_packed_within_fewer(tmp_path: Path) -> None:
    numpy.zeros(10, dtype="<u2").tofile(tmp_path / "a.bin")
    assert tokens(tmp_path / "a.bin", 2, end_of_document=0)._block_samples == 256  # type: ignore[attr-defined]
    files = [token_files.TokenFile(tmp_path / "a.bin", "<u2", 0, 2**28)]
    assert PackedTokens(files, 2**17, 0).block_sizes()[0] == 32
    assert PackedTokens(files, 2**22, 0).block_sizes()[0] == 16


def test_another_end_of_documents_shows_at_a_resume(folder: Path) -> None:
    numpy.random.default_rng(0).integers(0, 9, 20_000).astype("<u2").tofile(folder / "a.bin")
    facts = []
    for end in (3, 3, 4):
        data = tokens(folder / "a.bin", 32, end_of_document=end)
        reader = BatchReader(DataConfig(batch_size=12), 3, 0, 1, None, torch.device("cpu"))
        facts.append(data_facts(data, training_data(data, reader, None).order))
    assert changed(facts[0], facts[1]) == ""
    assert "different samples" in changed(facts[0], facts[2])


# What attention needs.


def documented(name: str) -> Any:
    """A function whose code docs/bring-your-own-model.md shows."""
    page = (Path(__file__).parents[2] / "docs/bring-your-own-model.md").read_text()
    code = page[page.index(f"def {name}(") :].split("```")[0]
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    return names[name]


def test_attention_with_the_documented_mask_sees_one_document(folder: Path) -> None:
    data = small(folder)
    inputs, _, documents = data.__getitems__(range(8))
    mask, positions = documented("separated")(documents)
    torch.manual_seed(0)
    table = torch.randn(3_000_000 // 1000, 4, 2, 8)
    query = table[inputs % 3000].transpose(1, 2)[..., 0, :]
    found = functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    lengths = documents.flatten() + 1000 * torch.arange(8).repeat_interleave(16)
    for row in range(8):
        for number in documents[row].unique().tolist():
            own = documents[row] == number
            alone = query[row : row + 1, :, own]
            expected = functional.scaled_dot_product_attention(alone, alone, alone, is_causal=True)
            assert torch.allclose(found[row : row + 1, :, own], expected, atol=1e-6)
            assert positions[row][own].tolist() == list(range(int(own.sum())))
    counts = torch.unique_consecutive(lengths, return_counts=True)[1]
    assert counts.sum() == 8 * 16 and len(counts) == sum(len(row.unique()) for row in documents)


# Documents of every kind.


def rows(data: PackedTokens) -> list[list[list[int]]]:
    """[inputs, targets, documents] of each sample."""
    return [[part.tolist() for part in data[index]] for index in range(len(data))]


def packed_rows(folder: Path, text: list[int], length: int) -> list[list[list[int]]]:
    numpy.array(text, dtype="<u2").tofile(folder / "a.bin")
    data = tokens(folder / "a.bin", length, end_of_document=END)
    assert isinstance(data, PackedTokens)
    return rows(data)


def test_an_empty_document_is_its_end_alone_and_has_no_target(tmp_path: Path) -> None:
    assert packed_rows(tmp_path, [END, 1, 2, END, END, END, 9], 6) == [
        [[END, 1, 2, END, END, END], [IGNORED, 2, END, IGNORED, IGNORED, IGNORED], [0, 1, 1, 1, 2, 3]]
    ]


def test_nothing_but_empty_documents(tmp_path: Path) -> None:
    assert packed_rows(tmp_path, [END] * 9, 4) == [[[END] * 4, [IGNORED] * 4, [0, 1, 2, 3]]] * 2


def test_a_document_longer_than_a_row_fills_rows_and_its_pieces_go_on_in_their_targets(
    tmp_path: Path,
) -> None:
    text = [*range(1, 10), END, 11, END, 99]
    assert packed_rows(tmp_path, text, 4) == [
        [[1, 2, 3, 4], [2, 3, 4, 5], [0, 0, 0, 0]],
        [[5, 6, 7, 8], [6, 7, 8, 9], [0, 0, 0, 0]],
        [[9, END, 11, END], [END, IGNORED, END, IGNORED], [0, 0, 1, 1]],
    ]


def test_a_text_without_an_end_is_a_document_up_to_the_end_of_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert packed_rows(tmp_path, [1, END, 3, 4, 5, 6, 7], 3) == [
        [[3, 4, 5], [4, 5, 6], [0, 0, 0]],
        [[1, END, 6], [END, IGNORED, 7], [0, 0, 1]],
    ]
    numpy.arange(1, 8, dtype="<u2").tofile(tmp_path / "b.bin")  # nothing ends in this file
    assert not caplog.messages
    data = tokens(tmp_path / "*.bin", 3, end_of_document=END)
    assert isinstance(data, PackedTokens)
    assert rows(data)[2:] == [[[1, 2, 3], [2, 3, 4], [0] * 3], [[4, 5, 6], [5, 6, 7], [0] * 3]]
    (said,) = caplog.messages
    assert "b.bin" in said and "first 7 tokens" in said and "packed as one document" in said


# Mistakes.


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (70_000, "70000; expected 0 to 65,535"),
        (-1, "-1; expected 0 to"),
        (True, "True; expected the number of a token"),
        ("</s>", "'</s>'; expected the number of a token"),
        (999, "not among the first 100 tokens of .*a.bin"),
    ],
)
def test_a_wrong_end_of_documents_is_one_line(tmp_path: Path, end: Any, words: str) -> None:
    numpy.arange(100).astype("<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=words) as caught:
        tokens(tmp_path / "a.bin", 10, end_of_document=end)
    assert "\n" not in str(caught.value) and "end_of_document" in str(caught.value)


def test_the_end_of_documents_is_searched_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numpy.arange(100).astype("<u2").tofile(tmp_path / "a.bin")
    monkeypatch.setattr(token_files, "CHUNK_TOKENS", 8)
    assert len(tokens(tmp_path / "a.bin", 10, end_of_document=99)) == 9
    monkeypatch.setattr(token_files, "SEARCHED_TOKENS", 99)
    with pytest.raises(ConfigError, match="first 99 tokens"):
        tokens(tmp_path / "a.bin", 10, end_of_document=99)


def test_a_mixture_of_packed_and_other_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (numpy.arange(2_000) % 50).astype("<u2").tofile(tmp_path / f"{name}.bin")
    packed_files, other = tokens(tmp_path / "a.bin", 10, end_of_document=0), tokens(tmp_path / "b.bin", 10)
    with pytest.raises(ConfigError, match="2 and 3 parts"):
        mix({"a": (packed_files, 1), "b": (other, 1)}).__getitems__(range(0, 300, 7))
    both = mix({"a": (packed_files, 1), "b": (tokens(tmp_path / "b.bin", 10, end_of_document=0), 1)})
    assert len(both.__getitems__(range(0, 300, 7))) == 3
