import sys
import time

from tandem import running

print(time.monotonic() - running.now(), flush=True)
for _ in sys.stdin:
    print(time.monotonic() - running.now(), flush=True)
