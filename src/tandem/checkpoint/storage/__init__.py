"""Storage for checkpoints: a local directory, or a remote location given by its address.

A new one is a class with the methods of `protocol.Remote`, and a row of `SCHEMES` in config/address.py.
"""

import os
from functools import cache
from importlib import import_module
from pathlib import PurePath

from tandem.checkpoint.storage.folder import Folder
from tandem.checkpoint.storage.protocol import Remote, Storage
from tandem.config.address import SCHEMES, RemotePath


def storage_at(where: PurePath) -> Storage:
    """Return the storage of `where`.

    Raises ConfigError, with the package to install, if a library is missing.
    """
    return remote_at(where) if isinstance(where, RemotePath) else Folder()


def remote_at(where: RemotePath) -> Remote:
    """Return the storage of an address, as `storage_at` does."""
    return _cached_remote(where.scheme, where.host)


@cache
def _cached_remote(scheme: str, host: str) -> Remote:
    module, _, name = SCHEMES[scheme].partition(":")
    remote: Remote = getattr(import_module(module), name)(scheme, host)
    return remote


os.register_at_fork(after_in_child=_cached_remote.cache_clear)  # a client's threads do not survive a fork
