"""Test whether a path exists, like pathlib, but raise an error of the volume (EIO, ESTALE, EACCES).

Since Python 3.14, pathlib returns False for such errors. A volume that fails for a moment would then look
like an empty directory of checkpoints, and a run would start again at step 0.
"""

import errno
import os
import stat

NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP})
"""The errors for which pathlib returned False up to Python 3.13 (`pathlib._IGNORED_ERRNOS`)."""


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


def _mode(path: "str | os.PathLike[str]") -> int | None:
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
    except ValueError:  # a null character, which no file name has
        pass
    return None
