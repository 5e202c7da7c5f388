import signal
import time


def hear(*_):
    for _ in range(10):  # type: ignore[assignment]
        print("heard")
    raise SystemExit(143)


signal.signal(signal.SIGTERM, hear)
while True:
    print("here", flush=True)
    time.sleep(0.1)
