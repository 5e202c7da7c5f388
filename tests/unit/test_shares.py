"""Shares of a batch: every sample somebody's, in whole samples, by weights, and micro-batches that match."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.checkpoint.store import CheckpointStore
from tandem.config import Settings
from tandem.data.batch_shares import (
    apportion,
    check_even,
    equal_shares,
    fits,
    given_shares,
    halved,
    slice_of,
)
from tandem.data.sampler import GlobalOrder, TrainBatches
from tandem.data.source import BatchReader
from tandem.errors import ConfigError
from tandem.launch.this_machine import gpus_of
from tandem.platforms.detection import Placement
from tandem.run.directory import RunDir
from tandem.work.task import TaskWorkload

weights = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=9)


@given(weights, st.integers(0, 500), st.integers(1, 5))
@example([977602.0, 999999.9999999999, 1000000.0], 1, 1)
def test_all_are_given_out_by_weight_and_nobody_gets_too_few(
    weights: list[float], more: int, at_least: int
) -> None:
    total = at_least * len(weights) + more
    sizes = apportion(total, weights, at_least)
    assert sum(sizes) == total and min(sizes) >= at_least
    ideal = [total * weight / sum(weights) for weight in weights]
    if min(ideal) >= at_least:
        assert all(abs(size - one) < 1 + 1e-6 for size, one in zip(sizes, ideal, strict=True))
    for i, one in enumerate(weights):  # who has the larger weight has no smaller share
        for j, other in enumerate(weights):
            assert one <= other or sizes[i] >= sizes[j]


@given(st.integers(1, 300), st.integers(1, 9))
def test_equal_weights_are_equal_shares(total: int, ranks: int) -> None:
    ranks = min(total, ranks)
    smallest, rest = divmod(total, ranks)
    assert apportion(total, [0.1] * ranks) == equal_shares(total, ranks)
    assert equal_shares(total, ranks) == tuple(smallest + (rank < rest) for rank in range(ranks))


@given(weights, st.integers(0, 300), st.none() | st.integers(1, 40), st.integers(0, 1000))
def test_ranks_share_out_the_global_batch_in_micro_batches_that_match(
    paces: list[float], more: int, micro: int | None, step: int
) -> None:
    order = GlobalOrder(1000, len(paces) + more, seed=5)
    sizes = apportion(order.batch_size, paces)
    if not fits(sizes, micro):
        sizes = equal_shares(order.batch_size, len(paces))
    cuts = [TrainBatches(order, rank, len(paces), micro, step, step + 1, sizes) for rank in range(len(paces))]
    seen = [[part.tolist() for _, part in cut.micro_batches()] for cut in cuts]
    flat = [index for parts in seen for part in parts for index in part]
    assert sorted(flat) == sorted(order.batch(step)[1].tolist())
    assert len({len(parts) for parts in seen}) == 1 and min(len(part) for p in seen for part in p) >= 1
    assert [sum(map(len, parts)) for parts in seen] == list(sizes)
    if micro is not None:
        assert max(len(part) for parts in seen for part in parts) <= micro + (micro == 1)


def test_the_shares_of_three_to_one() -> None:
    assert given_shares("3:1", 64, 2) == (48, 16)
    assert given_shares("1.5:0.5:1", 64, 3, 16) == (32, 11, 21)
    assert slice_of((48, 16), 0) == slice(0, 48) and slice_of((48, 16), 1) == slice(48, 64)
    assert given_shares("2:2", 64, 2) == equal_shares(64, 2) and slice_of((32, 32), 1) == slice(1, None, 2)


@pytest.mark.parametrize(
    ("text", "batch", "ranks", "micro", "said"),
    [
        ("3:1", 64, 3, None, "is for 2 ranks, but there are 3"),
        ("3:1", 64, 1, None, "is for 2 ranks, but there are 1"),
        ("30:1", 62, 2, 4, "leaves a rank 2 of 62 samples.*15 micro-batches.*larger --micro-batch-size"),
        ("1:1:1", 2, 3, None, "--batch-size 3 or more"),
    ],
)
def test_shares_that_do_not_fit_say_what_would(
    text: str, batch: int, ranks: int, micro: int | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        given_shares(text, batch, ranks, micro)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["3", "3:", ":3", "0:1", "0.0:1", "3:-1", "a:b", "3:1:", "3 : 1", "fast"])
def test_what_is_no_shares_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="batch_shares.*3:1") as caught:
        Settings.from_dict({"batch_shares": text})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["3:1", "1.5:1:1", "none", "0.5:10"])
def test_what_is_shares_is_taken(text: str) -> None:
    assert str(Settings.from_dict({"batch_shares": text}).data.batch_shares).lower() == text


def test_shares_fit_micro_batches_if_all_ranks_can_make_as_many() -> None:
    assert fits((58, 6), 10) and not fits((63, 1), 8)


def test_only_an_unequal_batch_without_shares_is_refused_at_a_fresh_start() -> None:
    def reader(**values: object) -> BatchReader:
        config = Settings().replace(batch_size=10, **values).data
        return BatchReader(config, 0, 0, 3, None, torch.device("cpu"))

    with pytest.raises(ConfigError, match="does not divide"):
        reader().check_shares()
    chosen = reader(batch_shares="2:1:1")
    chosen.check_shares()
    assert chosen.sizes == (5, 3, 2)


ONE_HOST = Placement("none", 3, 0, None, "127.0.0.101", 0, nodes_share_host=True)
BY_HAND = Placement("by-hand", 3, 0, 1, "node0", 29500)
NO_GPU, GPU = {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "0"}


def launched(placement: Placement, environ: Mapping[str, str], folder: Path, **values: object) -> None:
    settings = Settings().replace(**{"batch_size": 10, "run_dir": folder / "run", **values})
    TaskWorkload(RunDir.of(settings), settings, ()).check(placement, lambda: gpus_of(environ))


@pytest.mark.parametrize(
    ("placement", "environ", "values"),
    [
        (ONE_HOST, NO_GPU, {}),
        (ONE_HOST, GPU, {"device": "cpu"}),
        (replace(ONE_HOST, nodes=1, nproc=3), GPU, {}),
        (BY_HAND, GPU, {}),
        (BY_HAND, GPU, {"resume": "never"}),
        (replace(BY_HAND, nproc=None), GPU, {"device": "cpu"}),
        (replace(BY_HAND, nproc=4), GPU, {"batch_size": 15}),
    ],
)
def test_an_unequal_batch_is_refused_at_the_launch_where_the_ranks_are_known(
    placement: Placement, environ: dict[str, str], values: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="^--batch-size 1[05] does not divide evenly over (3|12) ranks;"):
        launched(placement, environ, tmp_path, **values)


@pytest.mark.parametrize(
    ("placement", "environ", "values"),
    [
        (ONE_HOST, NO_GPU, {"batch_size": 9}),
        (ONE_HOST, GPU, {}),  # a rank for each GPU of each node
        (replace(BY_HAND, nproc=None), NO_GPU, {}),  # other nodes may have some
        (replace(BY_HAND, elastic=(2, 3)), NO_GPU, {}),
        (replace(BY_HAND, node_rank=1), NO_GPU, {}),  # it may not see the run's checkpoints
        (BY_HAND, NO_GPU, {"batch_shares": "2:1:1"}),
        (BY_HAND, NO_GPU, {"strategy": "single"}),
        (BY_HAND, NO_GPU, {"resume": "runs/other"}),
        (BY_HAND, NO_GPU, {"run_dir": "s3://bucket/run"}),
    ],
)
def test_what_may_be_valid_is_left_to_the_ranks(
    placement: Placement, environ: dict[str, str], values: dict[str, object], tmp_path: Path
) -> None:
    launched(placement, environ, tmp_path, **values)


def test_a_run_that_goes_on_may_have_unequal_shares_unless_it_begins_anew(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "run" / "checkpoints").save(4, b"state", {})
    launched(BY_HAND, NO_GPU, tmp_path)
    with pytest.raises(ConfigError, match="does not divide"):
        launched(BY_HAND, NO_GPU, tmp_path, resume="never")


def test_the_next_batch_that_divides_is_named_once() -> None:
    with pytest.raises(ConfigError, match="--batch-size 1 does not divide evenly over 2 ranks; use 2$"):
        check_even(1, 2)


@pytest.mark.parametrize(
    ("sizes", "micro", "at_least", "expected"),
    [
        ([12, 12], None, 1, (12, 6)),
        ([12, 12], 7, 1, (6, 3)),  # 12 samples are cut into 6 and 6
        ([12, 12], 50, 1, (12, 6)),
        ([12, 12], 1, 1, (1, None)),
        ([12, 12], 3, 2, (3, 2)),
        ([12, 12], 2, 2, (2, None)),
        ([5, 5], None, 2, (5, 3)),  # into 3 and 2
        ([5, 5], 3, 2, (3, None)),  # into 2, 2 and 1
        ([3, 2], None, 1, (3, 2)),
        ([3, 2], 2, 1, (2, None)),
        ([9, 3], None, 1, (9, 5)),
        ([9, 3], 4, 1, (3, None)),  # more than 3 micro-batches would be empty on a rank
        ([9, 1], None, 1, (9, None)),
        ([1], None, 1, (1, None)),
    ],
)
def test_half_a_micro_batch_is_the_next_smaller_one_that_all_ranks_can_make(
    sizes: list[int], micro: int | None, at_least: int, expected: tuple[int, int | None]
) -> None:
    assert halved(sizes, micro, at_least) == expected


@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), st.none() | st.integers(1, 70))
def test_halves_are_what_the_ranks_then_make_and_end(sizes: list[int], micro: int | None) -> None:
    order = GlobalOrder(sum(sizes), sum(sizes), 0)
    seen = []
    while True:
        ranks = range(len(sizes))
        made = [TrainBatches(order, r, len(sizes), micro, 0, 1, sizes).micro_sizes(0) for r in ranks]
        now, half = halved(sizes, micro)
        assert max(map(max, made)) == now and min(map(min, made)) > 0
        seen.append(now)
        if half is None:
            break
        micro = half
    assert seen == sorted(set(seen), reverse=True)
