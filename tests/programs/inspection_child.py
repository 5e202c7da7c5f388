"""A rank for its agent's pipe: argv is the pipe's descriptor, the directory of logs, and what it does."""

import itertools
import sys
import time
from pathlib import Path

from tandem.script.lifeline import watch_agent_pipe
from tandem.telemetry.stacks import keep_stacks

keep_stacks(Path(sys.argv[2]), 3)
watch_agent_pipe(int(sys.argv[1]))
print("ready", flush=True)
if sys.argv[3] == "native":
    max(itertools.repeat(1, 10**12))  # line 15
time.sleep(600)  # line 16
