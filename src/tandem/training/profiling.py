"""Implement `--profile START:STEPS`: record a window of steps with torch.profiler, for chrome://tracing."""

import logging
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from torch.profiler import profile

from tandem.log import reporting

log = logging.getLogger("tandem.run")


def profiled(
    batches: Iterator[Any], window: str | None, first_step: int, path: Path
) -> Generator[Any, None, None]:
    """Yield `batches` (one item per step), and record the steps of the window to `path`.

    A step lasts from its batch to the request of the next one, or until `close`, which a run calls that ends
    or stops inside the window. Without a `window`, nothing is recorded.
    """
    if window is None:
        yield from batches
        return
    start, steps = map(int, window.split(":"))
    recording: Any = None
    try:
        for step, batch in enumerate(batches, first_step):
            # A run that resumes inside the window records the rest of it.
            if step == max(start, first_step) and step < start + steps:
                recording = profile()
                recording.__enter__()
            yield batch
            if recording is not None and step + 1 >= start + steps:
                _finish(recording, path)
                recording = None
    finally:
        if recording is not None:
            _finish(recording, path)


def _finish(recording: Any, path: Path) -> None:
    recording.__exit__(None, None, None)
    with reporting(f"write the profile {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        recording.export_chrome_trace(str(path))
        log.info("profile written to %s", path)
