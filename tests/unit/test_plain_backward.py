"""`loss.backward()` in a custom loop: refused where an optimizer uses it, a warning where it is unclear."""

import logging

import pytest
import torch
from torch import nn

from tandem.custom_loop.limits import PlainBackward, check_dataset, hints_as_arguments
from tandem.errors import ConfigError


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(3, 1)


@pytest.fixture
def plain(model: nn.Module) -> PlainBackward:
    found = PlainBackward()
    found.watch(model)
    return found


def ours(plain: PlainBackward, loss: torch.Tensor) -> None:
    plain.is_ours = True
    loss.backward()
    plain.is_ours = False


def test_gradients_of_a_plain_backward_are_refused_with_their_line(
    model: nn.Module, plain: PlainBackward
) -> None:
    model(torch.ones(2, 3)).mean().backward()
    with pytest.raises(ConfigError, match=r"test_plain_backward\.py line \d+: .*run\.backward\(loss\)"):
        plain.before_optimizer(model.parameters())


def test_gradients_that_are_cleared_or_followed_by_run_backward_pass(
    model: nn.Module, plain: PlainBackward, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(4):  # an adversarial input, whose gradient is made first
        model(torch.ones(2, 3)).mean().backward()
        model.zero_grad()
        ours(plain, model(torch.ones(2, 3)).mean())
        plain.before_optimizer(model.parameters())
        plain.end_step(step, True, step + 1)
    assert not caplog.records


def test_a_second_model_with_a_plain_backward_is_found(model: nn.Module, plain: PlainBackward) -> None:
    second = nn.Linear(3, 1)
    plain.watch(second)
    ours(plain, model(torch.ones(2, 3)).mean())
    plain.before_optimizer(model.parameters())
    second(torch.ones(2, 3)).mean().backward()
    with pytest.raises(ConfigError):
        plain.before_optimizer(second.parameters())


def test_gradients_of_unknown_origin_are_warned_of_once(
    model: nn.Module, plain: PlainBackward, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tandem.run"):
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            plain.before_optimizer(model.parameters())
            plain.end_step(step, False, step + 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "step 1" in caplog.records[0].getMessage()


def test_a_step_without_gradients_is_none_of_our_business(
    model: nn.Module, plain: PlainBackward, caplog: pytest.LogCaptureFixture
) -> None:
    plain.before_optimizer(model.parameters())
    plain.end_step(0, False, 1)
    assert not caplog.records


def test_a_loader_is_no_dataset() -> None:
    dataset = torch.utils.data.TensorDataset(torch.zeros(8, 2))
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    for wrong in (loader, iter(loader), 3, None):
        with pytest.raises(ConfigError, match="run.batches"):
            check_dataset(wrong)
    for right in (dataset, [1, 2], (n for n in range(3))):
        check_dataset(right)


def test_hints_name_what_was_typed() -> None:
    with pytest.raises(ConfigError, match="use batch_size=40 or less"), hints_as_arguments(set()):
        raise ConfigError("use --batch-size 40 or less")
    with pytest.raises(ConfigError, match="use --batch-size 40 or less"), hints_as_arguments({"batch_size"}):
        raise ConfigError("use --batch-size 40 or less")
