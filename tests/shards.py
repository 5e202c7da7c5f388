"""Tar shards for tests."""

import io
import tarfile
from pathlib import Path


def write_shard(path: Path, files: list[tuple[str, bytes]], format: int = tarfile.GNU_FORMAT) -> None:
    with tarfile.open(path, "w", format=format) as archive:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
