"""How long a test waits before it gives up: TEST_PATIENCE times what is right on two quiet cores (default 1).

A limit only ends what hangs, and no test asserts how long something took: on a slow machine give more.
"""

import os

PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))


def patient(seconds: float) -> float:
    return seconds * PATIENCE
