"""The places that checkpoints may lie in: a local folder, or an object store by its address.

A new one is a module with the methods of `protocol.Storage`, and a line here.
"""

import re
from functools import cache
from pathlib import Path, PurePath, PurePosixPath

from tandem.checkpoint.storage.folder import Folder
from tandem.checkpoint.storage.objects import Objects
from tandem.checkpoint.storage.protocol import Storage

OBJECT_STORES = {"s3": "'tandem[s3]'", "gs": "gcsfs", "az": "adlfs"}
"""fsspec's name, which begins the address, and what to pip install for it."""
_ADDRESS = re.compile(rf"({'|'.join(OBJECT_STORES)}):/+([^/].*)")


class ObjectPath(PurePosixPath):
    """The address of something on an object store: s3://bucket/prefix."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


def address(text: str | PurePath) -> PurePath:
    """A Path, or an ObjectPath for s3://bucket/prefix, also where pathlib has taken it for a path."""
    found = _ADDRESS.fullmatch(str(text))
    return ObjectPath(f"{found[1]}:/{found[2]}") if found else Path(text)


def storage_at(where: PurePath) -> Storage:
    """The storage that holds `where`. Raises ConfigError, with what to install, for a missing library."""
    return _objects(where.parts[0].rstrip(":")) if isinstance(where, ObjectPath) else Folder()


@cache
def _objects(scheme: str) -> Objects:
    return Objects(scheme, OBJECT_STORES[scheme])
