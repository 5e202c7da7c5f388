"""`--strategy ddp` with a single rank on a GPU: no gradients are exchanged, so the model is not wrapped.

DDP would copy all gradients and split a compiled model into one graph per bucket. This strategy rejects the
same models as DDP, so that a task behaves the same on one GPU as on several.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from tandem.config.slices import ExchangeConfig
from tandem.distributed.group import ProcessGroup
from tandem.distributed.strategy import single
from tandem.errors import ConfigError, TandemError

MOST_NAMES = 5
"""How many parameter names to show in a message."""


class UnusedParametersError(TandemError):
    """A step of the task left out parameters that other steps train."""


def listed(names: Sequence[str]) -> str:
    """List the first few names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


class OneRankDDPStrategy(single.SingleStrategy):
    """Run without DDP, but require a gradient for each trained parameter unless --find-unused is set."""

    checks_gradients = True

    def check(self, group: ProcessGroup) -> None:
        """Accept any number of ranks."""

    def check_exchange(self, exchange: ExchangeConfig) -> None:
        """Accept all settings, because they are meant for ddp."""
        self._exchange = exchange

    def shard(self, model: nn.Module) -> nn.Module:
        # The wrappers add prefixes to these names; messages show the model's own.
        self._named = dict(model.named_parameters())
        return model

    def exchange(self, gradients_not_finite: Tensor) -> Tensor:
        """Return the slots. Raises UnusedParametersError."""
        if without := self._without_gradient():
            raise UnusedParametersError(
                f"in this step, no gradient reached {listed(without)}; "
                "use --find-unused if a step may leave out parameters"
            )
        return super().exchange(gradients_not_finite)

    def check_gradients(self) -> None:
        """Raise ConfigError for parameters without a gradient, unless --find-unused is set.

        DDP would report them only in the next step, when the first step's gradients were already not
        averaged.
        """
        if without := self._without_gradient():
            raise ConfigError(
                f"the loss has no gradient for {listed(without)}; use them in the loss, freeze them with "
                "requires_grad_(False), or use --find-unused"
            )

    def _without_gradient(self) -> list[str]:
        """Return the names of the trained parameters without a gradient; none with --find-unused."""
        if self._exchange.find_unused:
            return []
        return [name for name, p in self._named.items() if p.requires_grad and p.grad is None]
