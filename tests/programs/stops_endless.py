import os
import signal
import sys
import time

if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: print("not now", flush=True))
if "polite" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(f"first line {time.time():.3f} pid {os.getpid()} rank {os.environ['RANK']}", flush=True)
while True:
    time.sleep(0.1)
