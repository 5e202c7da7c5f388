"""Make requirements-cpu.lock from requirements.lock: the same pins and hashes without CUDA's packages.

    python3 docker/cpu_lock.py <requirements.lock >requirements-cpu.lock        (part of `make lock`)

torch and torchvision are left out too. Their CPU builds are on PyTorch's index, with the same version
numbers but different hashes. docker/Dockerfile installs them at the versions of requirements.lock.
"""

import re
import sys

LEFT_OUT = re.compile(r"(torch|torchvision|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)==")


def cpu_lock(lock: str) -> str:
    """Return the lock of the CPU build; an entry is a line that starts with a name, plus indented hashes."""
    entries = re.split(r"^(?=[A-Za-z0-9])", lock, flags=re.MULTILINE)
    return "".join(entry for entry in entries if not LEFT_OUT.match(entry))


if __name__ == "__main__":
    sys.stdout.write(cpu_lock(sys.stdin.read()))
