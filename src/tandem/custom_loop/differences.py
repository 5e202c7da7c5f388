"""Check that values that should be equal on all ranks are: a checkpoint contains only rank 0's."""

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

from tandem.checkpoint.flatten import flatten
from tandem.distributed.group import ProcessGroup
from tandem.telemetry.recorder import Recorder
from tandem.training.replicas import checksum

log = logging.getLogger("tandem.run")


class Differences:
    """Compare kept values between ranks by checksums, and report each name that differs once."""

    def __init__(self, world: ProcessGroup) -> None:
        self._world = world
        self._reported = set[str]()

    def report_new(self, values: Mapping[str, Any], recorder: Recorder, step: int) -> None:
        """Compare `values`, by name. All ranks call this at the same step."""
        if self._world.size == 1:
            return
        ranks = self._world.gather_json({name: digest_of(value) for name, value in values.items()})
        first = ranks[0]
        found = [name for name in first if any(rank.get(name) != first[name] for rank in ranks)]
        new = [name for name in found if name not in self._reported]
        self._reported.update(new)
        if not new or not self._world.is_first:
            return
        recorder.event("kept_differs", step=step, names=new)
        log.warning(
            "%s: kept, but different on each rank at step %s; a checkpoint has rank 0's value only, so all "
            "ranks have that value after a restart. Name it in run.keep(..., per_rank={%r: ...})",
            ", ".join(new),
            f"{step:,}",
            new[0],
        )


def digest_of(value: Any) -> str:
    """Return a short hash that differs if two values differ."""
    skeleton, tensors = flatten({"": value})
    total = hashlib.sha256(repr(skeleton).encode(errors="replace"))
    for tensor in tensors:
        total.update(f"{tensor.dtype}{tuple(tensor.shape)}{int(checksum(tensor))}".encode())
    return total.hexdigest()[:16]
