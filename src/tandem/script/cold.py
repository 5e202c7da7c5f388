"""`python -m tandem.script.cold JOB`: run a rank in a new interpreter, which `rank.py` becomes by exec."""

import os
import pickle
import sys
from pathlib import Path

from tandem.process import name_process, take_back_safe_path
from tandem.script.lifeline import watch_agent_pipe
from tandem.script.rank import run_program
from tandem.signals import spare_programs_without_handlers

if __name__ == "__main__":
    take_back_safe_path(os.environ)
    job, start, lifeline = pickle.loads(Path(sys.argv[1]).read_bytes())
    spare_programs_without_handlers()
    if lifeline is not None:
        # Only the exec needed it. Programs that the script starts must not inherit the pipe.
        os.set_inheritable(lifeline, False)
        watch_agent_pipe(lifeline)
    name_process(f"tandem-rank-{start.position.rank}")  # exec removes the name
    run_program(job, start)
