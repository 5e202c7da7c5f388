"""A thread other than the main one receives SIGTERM while the main thread forks, in a block that it ends."""

import os
import signal
import threading
import time

from tandem.errors import StoppedError
from tandem.signals import StopFlag, deferred_signals

stop = StopFlag().install()  # before the thread, so that only this one is masked below
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
os.register_at_fork(after_in_parent=lambda: time.sleep(0.1))  # its errors would be dropped
step = "none"
try:
    with stop.exit_on_signal():
        with deferred_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            if os.fork() == 0:
                os._exit(0)
            os.wait()
            step = "forked"
        step = "after the block"
except StoppedError as error:
    print(step, error, signal.getsignal(signal.SIGTERM) == stop._handle, signal.pthread_sigmask(0, ()))
