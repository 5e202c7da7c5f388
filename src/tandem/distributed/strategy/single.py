"""One process, one device, no communication."""

from tandem.distributed.group import ProcessGroup
from tandem.distributed.strategy.base import Strategy
from tandem.errors import ConfigError


class SingleStrategy(Strategy):
    """Leaves the model unchanged."""

    def check(self, group: ProcessGroup) -> None:
        if group.size > 1:
            raise ConfigError(
                f"--strategy single trains in one process, but there are {group.size} ranks; "
                "use --strategy ddp, or --nproc 1 on one node"
            )
