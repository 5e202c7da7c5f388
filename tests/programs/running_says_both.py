import sys
import time

from tandem import running_clock

print(time.monotonic() - running_clock.now(), flush=True)
for _ in sys.stdin:
    print(time.monotonic() - running_clock.now(), flush=True)
