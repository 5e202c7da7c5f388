"""requirements-cpu.lock out of requirements.lock: the same pins and hashes without CUDA's packages.

    python3 docker/cpu_lock.py <requirements.lock >requirements-cpu.lock        (part of `make lock`)

torch and torchvision are left out as well: their CPU builds come from PyTorch's own index, under the same
version numbers but with other hashes. docker/Dockerfile installs them at the versions of requirements.lock.
"""

import re
import sys

LEFT_OUT = re.compile(r"(torch|torchvision|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)==")


def cpu_lock(lock: str) -> str:
    """The lock of the CPU build; an entry is a line that starts with a name, and its indented hashes."""
    entries = re.split(r"^(?=[A-Za-z0-9])", lock, flags=re.MULTILINE)
    return "".join(entry for entry in entries if not LEFT_OUT.match(entry))


if __name__ == "__main__":
    sys.stdout.write(cpu_lock(sys.stdin.read()))
