"""What counts as (sum, count), whatever it is made with."""

from typing import Any

import numpy
import pytest
import torch

from tandem.errors import ConfigError
from tandem.tasks.mistakes import check_sums, kind, line_of


def method() -> None: ...


@pytest.mark.parametrize(
    "pair",
    [
        (1, 2),
        [1.5, 2],
        (torch.tensor(3.0), torch.ones(1)),
        torch.tensor([1.0, 2.0]),
        (numpy.float32(1), numpy.int64(2)),
        (numpy.array(1.0), 2),
        numpy.ones(2),
    ],
)
def test_two_numbers_of_any_kind(pair: Any) -> None:
    check_sums(method, {"score": pair})


@pytest.mark.parametrize(
    "pair", [0.5, None, (1,), (1, 2, 3), "ab", torch.ones(3), torch.ones(2, 2), (torch.ones(2), 1), (1, "2")]
)
def test_anything_else_is_named(pair: Any) -> None:
    with pytest.raises(ConfigError, match=r"test_mistakes\.py line \d+: method returns .*'score'"):
        check_sums(method, {"score": pair})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None"),
        (0.5, "a float"),
        (1, "an int"),
        ((1, 2), "a tuple of 2"),
        ({}, "a dict"),
        (torch.ones(2, 3), "a tensor of shape (2, 3)"),
        (torch.nn.Linear(1, 1), "the model Linear"),
    ],
)
def test_a_value_in_words(value: Any, words: str) -> None:
    assert kind(value) == words


def test_what_has_no_source_has_no_line() -> None:
    assert line_of(len) == "" and line_of(method).endswith(": ")
