"""What the kernel is asked to do for a process of ours (Linux: prctl(2))."""

import ctypes

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def name_process(name: str) -> None:
    """What `ps` and `pkill` know this process by, in 15 characters; exec takes the name away."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def end_with_parent(number: int) -> None:
    """Get this signal when the parent dies, however it dies; exec keeps that."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
