import os
import time

from tandem.launch import workers

original = workers.end_with_parent  # type: ignore[attr-defined]


def end_with_parent(number):
    parent = os.getppid()
    open("asked", "w").close()
    while os.getppid() == parent:
        time.sleep(0.01)
    original(number)


def warm_up(job, expected):
    open("warmed", "w").close()


workers.end_with_parent = end_with_parent  # type: ignore[attr-defined]
