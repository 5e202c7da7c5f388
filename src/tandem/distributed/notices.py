"""Let the writer threads of the ranks exchange values through the store of their process group."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]


class StoreNotices:
    """The `ShardNotices` of a generation. Raises the store's RuntimeError if it is gone."""

    def __init__(self, store: Any) -> None:
        self._store = PrefixStore("tandem-saves", store)

    def set(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))

    def get_all(self, keys: Sequence[str]) -> list[Any] | None:
        # A get would wait, and block the client that the process group uses, too.
        if not self._store.check(list(keys)):
            return None
        return [json.loads(self._store.get(key)) for key in keys]

    def delete(self, key: str) -> None:
        with suppress(RuntimeError):  # a store in a file cannot
            self._store.delete_key(key)
