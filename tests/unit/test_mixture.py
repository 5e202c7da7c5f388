"""Mixtures of datasets: exact shares, each source in its own order, the same for any number of ranks."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from tandem.config.slices import DataConfig
from tandem.data import mix, token_files, tokens
from tandem.data.block_order import AHEAD
from tandem.data.datasets import TensorImages
from tandem.data.fetch import whole_fetch
from tandem.data.fingerprint import data_facts, reordered
from tandem.data.kinds import takes_workers, training_data
from tandem.data.mixture import CYCLE, Mixture
from tandem.data.sampler import GlobalOrder, TrainBatches
from tandem.data.source import BatchReader
from tandem.errors import ConfigError
from tandem.tasks.base import TaskWithDefaults
from tandem.tasks.build import order_of

CPU = torch.device("cpu")


class Named:
    """Samples (name, index) of one source."""

    def __init__(self, name: int, size: int) -> None:
        self.name = name
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self.name, index])


class InBlocks(Named):
    def __init__(self, name: int, sizes: Sequence[int]) -> None:
        super().__init__(name, sum(sizes))
        self.sizes = list(sizes)
        self.announced: list[int] = []
        self.held = 0

    def block_sizes(self) -> list[int]:
        return self.sizes

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]

    def will_need(self, blocks: Sequence[int]) -> None:
        self.announced.extend(blocks)

    def hold(self, blocks: int, processes: int) -> None:
        self.held = blocks


def three() -> Mixture:
    stages = {40: {"plain": 1, "small": 0, "blocks": 1}, 90: {"plain": 0, "small": 1, "blocks": 3}}
    blocks = InBlocks(2, [30] * 100)
    return mix({"plain": (Named(0, 5000), 7), "small": (Named(1, 90), 1), "blocks": (blocks, 2)}, stages)


def batches(mixture: Mixture, world_size: int, start: int, stop: int, **given: Any) -> list[Any]:
    """[step][sample] the pairs (source, index), over all ranks."""
    shares = []
    for rank in range(world_size):
        config = DataConfig(batch_size=96, **{"workers": 0, **given})
        data = training_data(mixture, BatchReader(config, 5, rank, world_size, None, CPU), 1000)
        shares.append(list(data.steps(start, stop)))
    return [
        [tuple(pair) for share in shares for part in share[step] for pair in part.tolist()]
        for step in range(stop - start)
    ]


def in_order(steps: list[Any], source: int) -> list[int]:
    return [index for step in steps for name, index in step if name == source]


@pytest.mark.parametrize("micro", [None, 7])
@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_global_batches_are_the_same_at_any_world_size(world_size: int, micro: int | None) -> None:
    wanted = batches(three(), 1, 35, 45)
    assert batches(three(), world_size, 35, 45, micro_batch_size=micro) == wanted


def test_loader_processes_and_a_later_start_change_nothing() -> None:
    wanted = batches(three(), 1, 85, 95)
    assert batches(three(), 2, 85, 95, workers=2) == wanted
    assert batches(three(), 3, 88, 95) == wanted[3:]


def test_each_source_is_read_once_before_it_begins_again() -> None:
    mixture = three()
    steps = batches(mixture, 1, 0, 160)
    for source, size in ((0, 5000), (1, 90), (2, 3000)):
        read = in_order(steps, source)
        # Samples of one epoch of a source, and of the next: batches are sorted by lanes.
        most = Counter(read)
        rounds = -(-len(read) // size)
        assert max(most.values()) <= rounds and min(most[index] for index in range(size)) >= rounds - 2
    assert mixture.order(0, 96, 5).used_before(160) == [len(in_order(steps, source)) for source in range(3)]


def test_shares_are_exact_in_each_cycle() -> None:
    mixture = three()
    assert [stage.quotas for stage in mixture.stages] == [(1434, 205, 409), (1024, 0, 1024), (0, 512, 1536)]
    order = mixture.order(0, 64, 3)
    samples = [order.batch(step)[1] for step in range(32)]  # one cycle
    counts = torch.bucketize(torch.cat(samples), torch.tensor([5000, 5090]), right=True).bincount()
    assert counts.tolist() == [1434, 205, 409]
    # A batch has its share, within a few standard deviations.
    plain = [int((batch < 5000).sum()) for batch in samples]
    assert 25 < min(plain) < max(plain) < 62 and len(set(plain)) > 3


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5)), min_size=1, max_size=4),
    st.integers(1, 70),
    st.integers(0, 400),
    st.integers(1, 5),
)
def test_any_step_is_found_and_used_samples_add_up(
    sources: list[tuple[int, int]], batch_size: int, step: int, ranks: int
) -> None:
    weights = {str(number): weight for number, (_, weight) in enumerate(sources)}
    weights["0"] = 1
    given = {name: (Named(0, size), weights[name]) for name, (size, _) in zip(weights, sources, strict=True)}
    mixture = mix(given, {200: dict.fromkeys(weights, 1)})
    batch_size = min(batch_size, len(mixture))
    order = mixture.order(0, batch_size, 9)
    assert sum(order.used_before(step)) == step * batch_size
    again = mixture.order(0, batch_size, 9)
    again.batch(step + 70)
    _, batch = order.batch(step)
    assert 0 <= batch.min() and batch.max() < len(mixture)
    ranks = min(ranks, batch_size)
    shares = [TrainBatches(again, rank, ranks, None, step, step + 1) for rank in range(ranks)]
    assert [index for share in shares for _, indices, _ in share for index in indices] == batch.tolist()


def test_a_source_keeps_its_order_whatever_the_weights() -> None:
    def read(weight: float, more: dict[str, Any]) -> list[int]:
        # A batch of one: larger batches are sorted by lanes.
        order = mix({"a": (Named(0, 700), weight), "b": (Named(1, 900), 1), **more}).order(0, 1, 4)
        indices = (int(order.batch(step)[1]) for step in range(2000))
        return [index for index in indices if index < 700][:600]

    wanted = read(1, {})
    assert len(wanted) == len(set(wanted)) == 600
    assert read(2.5, {}) == wanted == read(3, {"c": (Named(2, 10), 1)})


@pytest.mark.parametrize("world_size", [1, 4])
def test_blocks_of_sources_are_announced_before_they_are_read(world_size: int) -> None:
    first, second = InBlocks(0, [20] * 150), InBlocks(1, [7] * 400)
    mixture = mix({"first": (first, 1), "plain": (Named(2, 100), 1), "second": (second, 2)})
    config = DataConfig(batch_size=256, workers=0)
    data = training_data(mixture, BatchReader(config, 5, world_size - 1, world_size, None, CPU), 300)
    assert first.held > 0 and second.held > 0
    for step, (part,) in enumerate(data.steps(0, 300)):
        for source in (first, second):
            of_source = part[part[:, 0] == source.name, 1] // source.sizes[0]
            assert set(of_source.tolist()) <= set(source.announced)
        if step == 0 and world_size == 4:
            # A quarter of the lanes, and a few beside them.
            assert first.held <= 0.6 * 64 * 5 and step < AHEAD


def test_a_node_reads_its_part_of_the_blocks() -> None:
    mixture = mix({"a": (InBlocks(0, [20] * 640), 1), "b": (InBlocks(1, [20] * 640), 1)})
    order = mixture.order(0, 512, 2)
    read = [len(order.blocks(0, 20, slice(rank * 64, (rank + 1) * 64))) for rank in range(8)]
    assert sum(read) < 1.5 * len(order.blocks(0, 20, slice(0, 512)))


def test_token_files_are_mixed_as_whole_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (numpy.arange(9_001) + 20_000).astype("<u2").tofile(tmp_path / "web.bin")
    numpy.arange(3_001).astype("<u2").tofile(tmp_path / "code.bin")
    monkeypatch.setattr(token_files, "MANY_WINDOWS", 2000)
    web = tokens(tmp_path / "web.bin", length=4)
    assert hasattr(web, "block_sizes")
    mixture = mix({"web": (web, 3), "code": (tokens(tmp_path / "code.bin", length=4), 1)})
    assert whole_fetch(mixture) is not None and not takes_workers(mixture, None)
    inputs, targets = mixture.__getitems__([2300, 0, 2250])
    assert inputs.tolist()[1] == [20_000, 20_001, 20_002, 20_003] and inputs[2, 0] == 0
    assert torch.equal(targets, inputs + 1)
    data = training_data(mixture, BatchReader(DataConfig(batch_size=64), 5, 0, 1, None, CPU), None)
    of_web = [float((batch[0][:, 0] >= 20_000).double().mean()) for (batch,) in data.steps(0, 32)]
    assert sum(of_web) / 32 == 0.75


def test_batches_of_tensors_and_single_samples_are_mixed(tmp_path: Path) -> None:
    numpy.arange(401).astype("<u2").tofile(tmp_path / "a.bin")
    rows = TensorDataset(torch.zeros(50, 4, dtype=torch.int64), torch.ones(50, 4, dtype=torch.int64))
    mixture = mix({"rows": (rows, 1), "tokens": (tokens(tmp_path / "a.bin", length=4), 1)})
    data = training_data(mixture, BatchReader(DataConfig(batch_size=8, workers=0), 5, 0, 1, None, CPU), None)
    for ((inputs, targets),) in data.steps(0, 3):
        assert inputs.shape == targets.shape == (8, 4) and (targets - inputs == 1).all()


def test_another_mixture_than_the_checkpoints_shows() -> None:
    def facts(stages: Any) -> Any:
        mixture = mix({"a": (Named(0, 50), 1), "b": (Named(1, 50), 1)}, stages)
        return data_facts(mixture, mixture.order(0, 10, 0))

    assert facts(None)["order"] == "mixture" and not reordered(facts(None), facts({}))
    assert reordered(facts(None), facts({9: {"a": 1, "b": 2}}))
    assert reordered(facts(None), data_facts(Named(0, 100), GlobalOrder(100, 10, 0)))


def test_the_shares_are_reported() -> None:
    text, is_warning = three().order(0, 96, 0).describe()
    assert "plain 70.0%" in text and "from step 90: plain 0.0%" in text and not is_warning


class Weighted:
    def build_model(self) -> Any: ...

    def build_datasets(self) -> Any: ...

    def loss(self, model: Any, batch: Any) -> Any: ...

    def sample_lengths(self, train: Any) -> Any:
        return [1.0] * len(train)


def test_weights_of_samples_and_a_mixture_are_refused() -> None:
    with pytest.raises(ConfigError, match="mixture"):
        order_of(TaskWithDefaults(Weighted()), three())


PIXELS = torch.zeros(4, 1, 2, 2, dtype=torch.uint8)
IMAGES = TensorImages(PIXELS, torch.zeros(4), (0.0,), (1.0,), augment=lambda *_: PIXELS)


@pytest.mark.parametrize(
    ("sources", "stages", "word"),
    [
        ({}, None, "source"),
        ({"a": (iter(()), 1)}, None, "a: "),
        ({"a": (Named(0, 0), 1)}, None, "empty"),
        ({"a": (Named(0, 5), 0)}, None, "weights"),
        ({"a": (Named(0, 5), -1)}, None, "-1"),
        ({"a": (Named(0, 5), float("nan"))}, None, "nan"),
        ({"a": (Named(0, 5), "1")}, None, "'1'"),
        ({"a": (three(), 1)}, None, "mixture"),
        ({"a": (IMAGES, 1)}, None, "augments"),
        ({"a": (Named(0, 5), 1)}, {0: {"a": 1}}, "step 0"),
        ({"a": (Named(0, 5), 1)}, {5: {"b": 1}}, "step 5"),
        ({"a": Named(0, 5)}, None, "a: got Named"),
        ({"a": [1, 2, 3]}, None, "a: got 3 values"),
        ([(Named(0, 5), 1)], None, "sources: invalid type list"),
        ({"a": (Named(0, 5), 1)}, [{"a": 1}], "stages: invalid type list"),
        ({"a": (Named(0, 5), 1)}, {5: 1}, "step 5: invalid type int"),
    ],
)
def test_a_wrong_mixture_is_one_line(sources: Any, stages: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as raised:
        mix(sources, stages)
    assert "\n" not in str(raised.value) and "mix()" in str(raised.value)


def test_a_cycle_is_known() -> None:
    """A checkpoint's position refers to it: with another one, the order needs another name."""
    order = mix({"a": (Named(0, 700), 3), "b": (Named(1, 900), 1)}).order(0, 8, 1)
    assert (CYCLE, order.batch(3)[1].tolist()) == (2048, [424, 426, 1072, 585, 503, 226, 632, 508])
