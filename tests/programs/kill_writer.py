import os
import sys
import time

from tandem.process import name_process

name_process("tandem-rank-1")
file = open(sys.argv[1], sys.argv[2])
if os.fork() == 0:  # as a loader's worker does, it inherits what is open
    more = open(sys.argv[3], "a") if sys.argv[3:] else None
    time.sleep(60)
print(os.getpid(), flush=True)
time.sleep(60)
