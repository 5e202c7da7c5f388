"""Ask a volume about its paths: which exist, which directory is a copy, what time its clock shows.

`exists` and `is_directory` are like pathlib's, but raise an error of the volume (EIO, ESTALE, EACCES).
Since Python 3.14, pathlib returns False for such errors. A volume that fails for a moment would then look
like an empty directory of checkpoints, and a run would start again at step 0.
"""

import errno
import os
import stat

NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP, errno.ENAMETOOLONG})
"""The errors for which pathlib returned False up to Python 3.13, and that of a name no file can have."""


def exists(path: "str | os.PathLike[str]") -> bool:
    """Return whether `path` exists, following links. Raises OSError if that is unknown."""
    return _mode(path) is not None


def is_directory(path: "str | os.PathLike[str]") -> bool:
    """Return whether `path` is a directory, following links. Raises OSError if that is unknown."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def is_file(path: "str | os.PathLike[str]") -> bool:
    """Return whether `path` is a regular file, following links. Raises OSError if that is unknown."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def check_replaceable(path: "str | os.PathLike[str]") -> None:
    """Raise OSError if `path` is a device, a pipe or a socket, such as /dev/stdout.

    A file that is written next to it and renamed would take its place for all programs of this machine.
    """
    mode = _mode(path)
    is_descriptor = os.path.islink(path) and os.readlink(path).startswith("/proc/")  # even of a regular file
    if is_descriptor or (mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is not a regular file")


def _mode(path: "str | os.PathLike[str]") -> int | None:
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
    except ValueError:  # a null character, which no file name has
        pass
    return None


def identity(folder: "str | os.PathLike[str]") -> list[int | str]:
    """Return [device, inode, absolute path] of a directory, for `is_elsewhere`. Raises OSError."""
    found = os.stat(folder)
    return [found.st_dev, found.st_ino, os.path.realpath(folder)]


def is_elsewhere(noted: object, folder: "str | os.PathLike[str]") -> bool:
    """Return True if `noted`, an identity, is that of another directory, from which `folder` was copied.

    A directory that was renamed keeps its inode, and one on some network file systems only its path. A copy
    keeps neither. False if `noted` is no identity. Raises OSError.
    """
    if not isinstance(noted, list) or len(noted) != 3:
        return False
    here = identity(folder)
    return noted[:2] != here[:2] and noted[2:] != here[2:]


def volume_time(folder: "str | os.PathLike[str]") -> float:
    """Return the time of the clock that dates files in `folder`, which may be that of a file server.

    Ages of files are differences to it: this machine's clock may be hours off. Creates a file for a moment.
    Raises OSError.
    """
    path = os.path.join(folder, f".tandem-clock-{os.urandom(4).hex()}")
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        os.unlink(path)
