import os
import signal

from tandem.log import setup
from tandem.telemetry.displays import Progress

setup(None, None, 0, to_terminal=True, json_lines=False)
if os.fork() == 0:
    progress = Progress(100)
    progress.advance(40)
    os.kill(os.getpid(), signal.SIGKILL)
os.wait()
import logging  # noqa: E402

logging.getLogger("tandem").warning("rank 0 on node 0 was killed")
