"""`python -m tandem.script.fresh_interpreter JOB`: run a rank in a new interpreter.

`rank.py` replaces its process with this program by exec.
"""

import os
import pickle
import sys
from pathlib import Path

from tandem.process import name_process, undo_safe_path
from tandem.script.lifeline import watch_agent_pipe
from tandem.script.rank import run_program
from tandem.signals import ignore_unhandled_scheduler_signals

if __name__ == "__main__":
    undo_safe_path(os.environ)
    job, start, lifeline = pickle.loads(Path(sys.argv[1]).read_bytes())
    ignore_unhandled_scheduler_signals()
    if lifeline is not None:
        # Only the exec needed this flag. Programs that the script starts must not inherit the pipe.
        os.set_inheritable(lifeline, False)
        watch_agent_pipe(lifeline)
    name_process(f"tandem-rank-{start.position.rank}")  # exec removes the name
    run_program(job, start)
