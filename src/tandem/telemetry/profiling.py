"""Record a rank's next steps with torch.profiler, at its agent's request, with no setup in advance.

The thread that trains starts and stops the profiler between two steps: `Clock.end_step` and the observer of
scripts call `step_ended`. Another thread writes the file. The profiler changes no result of the training.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

Report = Callable[[Mapping[str, Any], str | None, Path | None], None]


class _Window:
    """The window of a recording: `steps` steps after step `first`, or after the next one that ends."""

    def __init__(self, first: int, steps: int, path: Path, report: Report) -> None:
        self.first = first
        self.steps = steps
        self.path = path
        self.report = report
        self.is_cancelled = False
        self._profile: Any = None
        self._after = 0  # the number of finished steps when the recording began
        self._began = 0.0

    def step_ended(self, step: int) -> bool:
        """Begin or end the recording; return True once it is over. The training thread calls this."""
        if self._profile is None:
            if self.is_cancelled:
                return True
            if step >= self.first:
                self._start(step)
            return False
        if step < self._after + self.steps and not self.is_cancelled:
            return False
        self._stop()
        return True

    def _start(self, step: int) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        from tandem.torch_private import is_profiling, quiet_profiler

        if is_profiling():
            raise RuntimeError("the program uses torch.profiler itself at the moment")
        quiet_profiler()
        on_gpu = [ProfilerActivity.CUDA] if cast(Any, torch.cuda).is_initialized() else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_gpu])
        self._after = step
        self._began = time.monotonic()
        self._profile.start()

    def _stop(self) -> None:
        seconds = time.monotonic() - self._began
        self._profile.stop()
        if not self.is_cancelled:
            facts = {"after": self._after, "steps": self.steps, "seconds": round(seconds, 3)}
            threading.Thread(target=self._write, args=(facts,), name="tandem-inspection", daemon=True).start()

    def _write(self, facts: Mapping[str, Any]) -> None:
        try:
            self._profile.export_chrome_trace(str(self.path))
            self.report(facts, None, self.path)
        except Exception as error:  # the rank trains on
            self.report({}, f"the profile could not be written: {error}", None)


_window: _Window | None = None


def ask(options: Mapping[str, float], path: Path, report: Report) -> None:
    """Record `steps` steps after step `first` to `path`; `report` gets the facts, or an error of one line."""
    global _window
    if "torch" not in sys.modules:
        report({}, "the rank has not imported torch", None)
    elif _window is not None:
        report({}, "a profile is being recorded", None)
    else:
        _window = _Window(int(options["first"]), int(options["steps"]), path, report)


def cancel() -> None:
    """End a recording without a file, at the end of the current step."""
    if _window is not None:
        _window.is_cancelled = True


def step_ended(step: int) -> None:
    """Record that `step` steps are finished. The training thread calls this in each step; never raises."""
    global _window
    window = _window
    if window is None:
        return
    try:
        is_over = window.step_ended(step)
    except Exception as error:
        is_over = True
        with suppress(OSError):  # the agent's directory is gone
            window.report({}, f"no profile: {error}", None)
    if is_over:
        _window = None
