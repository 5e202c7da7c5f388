import os
import signal
import time


def handler(number, _frame):
    open(f"handled-{number}", "w").close()


for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
    try:
        signal.signal(number, handler)
    except OSError:
        pass
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
while first:
    open(f"runs-{os.environ['RANK']}", "w").write(str(os.getpid()))
    time.sleep(0.1)
