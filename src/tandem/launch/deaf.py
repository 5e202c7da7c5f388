"""What the fork server imports first: it is deaf to stop signals, and ends with its agent.

Alone (no torch) when its ranks become new interpreters. It works at import time, and only in the fork server.
"""

import signal

from tandem.process import end_with_parent
from tandem.signals import ignore_stop_signals

# A scheduler signals the whole process tree. Were the fork server to die of it, the agent would lose
# its ranks' exit codes while they still save; each rank installs its own handlers first thing.
ignore_stop_signals()
# It would notice by its pipe; stopped, or with its interpreter stuck in C code, it would not.
end_with_parent(signal.SIGKILL)
