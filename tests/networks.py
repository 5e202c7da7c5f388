"""Machines on a network of their own: namespaces on one bridge, which end with the test. Needs root."""

import os
import subprocess
import time
from collections.abc import Iterator, Sequence

from patience import patient


class Machine:
    """One of them: a command line that begins with `on` runs there, and others reach it at `address`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.address = f"10.88.0.{number}"
        self.holder = subprocess.Popen(["unshare", "--net", "sleep", "1200"], stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + patient(10)
        while os.readlink(f"/proc/{self.holder.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            assert time.monotonic() < deadline, "no network namespace within 10 s"
            time.sleep(0.01)

    @property
    def on(self) -> list[str]:
        return ["nsenter", "--target", str(self.holder.pid), "--net", "--"]

    def run(self, *commands: str) -> None:
        for command in commands:
            subprocess.run([*self.on, *command.split()], check=True)

    def connect(self, fabric: "Machine") -> None:
        """Join the bridge of `fabric`."""
        self.fabric = fabric
        cable = f"ip link add cable{self.number} type veth peer name eth0 netns {self.holder.pid}"
        fabric.run(cable, f"ip link set cable{self.number} master br0 up")
        self.run("ip link set lo up", f"ip addr add {self.address}/24 dev eth0", "ip link set eth0 up")

    def set_cable(self, state: str) -> None:
        """`down` as if its cable were pulled, then `up` again."""
        self.fabric.run(f"ip link set cable{self.number} {state}")

    def remove(self) -> None:
        self.holder.kill()
        self.holder.wait()


def machines(count: int) -> Iterator[Sequence[Machine]]:
    """So many of them, for a fixture."""
    made: list[Machine] = []
    try:
        for number in range(count + 1):
            made.append(Machine(number))
        fabric, *found = made
        fabric.run("ip link add br0 type bridge", "ip link set br0 up")
        for each in found:
            each.connect(fabric)
        yield found
    finally:
        for each in made:
            each.remove()
