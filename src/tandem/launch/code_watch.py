"""Warn if ranks run other code than before a restart, or than the ranks of another node.

Neither stops a run: a restart with a correction is useful, and files may differ for a reason. But ranks with
different code train without an error to weights that no run of one version would give.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.code_files import CodeFile, difference, digests, named, read_code
from tandem.work.base import Workload

log = logging.getLogger("tandem.agent")

CODE_KEY = "tandem/code"


class CodeWatch:
    """The code of this node's ranks, from one generation to the next."""

    def __init__(self, work: Workload, imports_file: Path) -> None:
        self._work = work
        self._imports_file = imports_file
        self._known: dict[str, CodeFile] = {}

    def begin_generation(self, store: Any = None) -> None:
        """Look at the files that the ranks are about to import; warn if some changed since the last time.

        With a `store`, write their digests there, for the other nodes.
        """
        is_restart = bool(self._known)
        known = {**read_code(self._imports_file), **self._work.code(), **self._known}
        self._known = {name: each.now() for name, each in known.items()}
        changed = [
            each.path
            for name, each in known.items()
            # A file that is gone may be one that torch generates for a process.
            if self._known[name].digest not in ("", each.digest)
        ]
        if changed and is_restart:
            what = named(changed, "has", "have")
            log.warning("%s changed since the ranks last started; they now run the changed code", what)
        if store is not None:
            store.set(CODE_KEY, json.dumps(digests(self._known)))

    def compare(self, store: Any) -> None:
        """Warn about files whose content differs on the first node, which has written its digests."""
        theirs = _digests(store.get(CODE_KEY)) if store.check([CODE_KEY]) else {}
        if warning := difference(self._known, theirs):
            log.warning("%s", warning)


def _digests(text: bytes) -> Mapping[str, Any]:
    """Parse the first node's digests; empty for anything else: any client of the store can write there."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
