import ctypes
import pathlib


def stand():
    # As a wait for a peer that hangs: no handler of Python's runs.
    pathlib.Path("stands").touch()
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex), libc.pthread_mutex_lock(mutex)
