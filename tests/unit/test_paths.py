"""Whether a path exists: an error of the volume is no answer."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoint.store import CheckpointStore
from tandem.errors import CheckpointError
from tandem.paths import exists, is_directory, is_file

ASKED = [exists, is_directory, is_file]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def fail(number: int) -> None:
        def stat(*_: Any, **__: Any) -> os.stat_result:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "stat", stat)

    return fail


def test_what_there_is(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    (link := tmp_path / "link").symlink_to(tmp_path)
    (lost := tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    (circle := tmp_path / "circle").symlink_to(circle)
    long = tmp_path / ("x" * 300)
    answers = {
        path: [ask(path) for ask in ASKED] for path in (file, link, lost, circle, file / "x", "\0", long)
    }
    assert answers == {
        file: [True, False, True],
        link: [True, True, False],
        **{path: [False] * 3 for path in (lost, circle, file / "x", "\0", long)},
    }


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("ask", ASKED)
def test_a_failing_volume_is_no_answer(
    ask: Callable[[Path], bool], number: int, failing: Callable[[int], None], tmp_path: Path
) -> None:
    failing(number)
    with pytest.raises(OSError) as caught:  # noqa: PT011
        ask(tmp_path)
    assert caught.value.errno == number


def test_a_failing_volume_is_no_empty_store(failing: Callable[[int], None], tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    failing(errno.EIO)
    with pytest.raises(CheckpointError, match="Input/output error"):
        store.steps()
