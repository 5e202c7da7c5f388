import time

from tandem.signals import default_signals


def rank(job, start):
    open("forked", "w").close()
    while not __import__("os").path.exists("signalled"):
        time.sleep(0.01)
    default_signals()
    time.sleep(300)
