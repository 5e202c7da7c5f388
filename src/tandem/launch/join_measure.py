"""Measure, for `tandem doctor --join`, the devices of this node and its link to another node.

Nodes may share a busy machine. Time in which other processes had the core does not count, because it says
nothing about the node; time in which this node's own CPU limit stopped it does.
"""

import hmac
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tandem.distributed.neighbor_link import receive, receive_into
from tandem.process import control_groups
from tandem.timeouts import JOIN_LINK_SECONDS, JOIN_PEER_SECONDS, JOIN_SPEED_SECONDS

SIZE = 256
GPU_SIZE = 4096
TOKEN_BYTES = 32
PINGS = 16
FIRST_BURST = 2**18
LARGEST_BURST = 2**23
LEAST_BURST_SECONDS = 0.02
"""Bursts grow until one takes this long: most of it must not be a wait for a busy core."""
LEAST_BURSTS = 3
LENGTH_BYTES = 8
OK = b"k"


def cpu_stat_files(root: Path = Path("/")) -> Iterator[Path]:
    """Yield the cpu.stat of this process's control groups and of those above them."""
    for folder, _ in control_groups(root, "cpu"):
        if (folder / "cpu.stat").is_file():
            yield folder / "cpu.stat"


def throttled_seconds(files: list[Path]) -> float:
    """Return how long a CPU limit has stopped this process, in its own or a higher control group."""
    longest = 0.0
    for file in files:
        with suppress(OSError, ValueError):
            for line in file.read_text(encoding="ascii").splitlines():
                name, _, number = line.partition(" ")
                unit = {"throttled_usec": 1e-6, "throttled_time": 1e-9}.get(name)
                longest = max(longest, int(number) * unit if unit else 0.0)
    return longest


def _waited_seconds() -> float:
    """Return how long this thread has been ready to run but had no core (the kernel's schedstat)."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    return 0.0


class OwnTime:
    """This thread's time since construction, split by cause: seconds of one core."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._throttled = throttled_seconds(files)
        self._waited = _waited_seconds()
        self._cpu = time.thread_time()
        self._wall = time.monotonic()

    @property
    def wall(self) -> float:
        """The whole time."""
        return time.monotonic() - self._wall

    @property
    def cpu(self) -> float:
        """Time on a core."""
        return time.thread_time() - self._cpu

    @property
    def throttled(self) -> float:
        """Time in which a CPU limit stopped this thread, but at most the time that it had no core."""
        return min(throttled_seconds(self._files) - self._throttled, max(0.0, self.wall - self.cpu))

    def without_others(self) -> float:
        """Return the time without the part in which other processes had the core."""
        # The kernel also counts time stopped by a limit as waiting.
        others = max(0.0, _waited_seconds() - self._waited - self.throttled)
        return max(self.wall - others, self.cpu, 1e-9)


def devices() -> list[torch.device]:
    """Return the CPU and all GPUs that torch sees."""
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def kind_of(device: torch.device) -> str:
    """Return what a device is compared by: "cpu", or the name of the GPU."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


class Speed(NamedTuple):
    """Products per second of a device, and the share of the time in which a CPU limit stopped this node."""

    rate: float
    throttled: float


def speed_of(device: torch.device, seconds: float = JOIN_SPEED_SECONDS) -> Speed:
    """Multiply matrices on one core or one GPU for `seconds`. Raises RuntimeError for a GPU that fails."""
    if device.type != "cpu":
        return Speed(_speed_of_gpu(device, seconds), 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        matrix = torch.ones(SIZE, SIZE)
        matrix @ matrix  # the first product loads the library
        files = list(cpu_stat_files())
        own = OwnTime(files)
        count = 0
        while own.wall < seconds:
            matrix @ matrix
            count += 1
        cpu = own.cpu
        throttled = own.throttled
        return Speed(count / (cpu + throttled), throttled / own.wall)
    finally:
        torch.set_num_threads(threads)


def _speed_of_gpu(device: torch.device, seconds: float) -> float:
    """Time single products by the GPU's own clock; the quickest counts, whatever the host does."""
    with torch.cuda.device(device):
        matrix = torch.ones(GPU_SIZE, GPU_SIZE, device=device)
        torch.matmul(matrix, matrix)
        best = float("inf")
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            # torch has no annotations for this class.
            make: Callable[..., Any] = torch.cuda.Event
            begin = make(enable_timing=True)
            end = make(enable_timing=True)
            begin.record()
            torch.matmul(matrix, matrix)
            end.record()
            end.synchronize()
            best = min(best, float(begin.elapsed_time(end)))
    return 1000 / best


class MeasuredLink(NamedTuple):
    """Bytes per second that this end sent, and the round trip in seconds (0 at the end that did not ask)."""

    rate: float
    latency: float


class LinkListener:
    """A listener for another node, which measures the link and must begin with `token`."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._listener.settimeout(JOIN_PEER_SECONDS)
        self.host = host
        self.port = int(self._listener.getsockname()[1])
        self.token = secrets.token_hex(TOKEN_BYTES // 2)

    def measure(self) -> MeasuredLink:
        """Answer the node that connects. Raises OSError if none does."""
        ends = time.monotonic() + JOIN_PEER_SECONDS
        while time.monotonic() < ends:
            connection, _ = self._listener.accept()
            with connection:
                _prepare(connection)
                with suppress(ConnectionError):
                    if hmac.compare_digest(receive(connection, TOKEN_BYTES), self.token.encode()):
                        for _ in range(PINGS):
                            connection.sendall(receive(connection, 1))
                        _receive_bursts(connection)
                        return MeasuredLink(_send_bursts(connection), 0.0)
        raise TimeoutError("the other node did not connect")


def measure_link(host: str, port: int, token: str) -> MeasuredLink:
    """Connect to another node's listener and measure both directions with it. Raises OSError."""
    with socket.create_connection((host, port), timeout=JOIN_PEER_SECONDS) as connection:
        _prepare(connection)
        connection.sendall(token.encode())
        latency = min(_ping(connection) for _ in range(PINGS))
        rate = _send_bursts(connection)
        _receive_bursts(connection)
        return MeasuredLink(rate, latency)


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(JOIN_PEER_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _ping(connection: socket.socket) -> float:
    began = time.monotonic()
    connection.sendall(OK)
    receive(connection, 1)
    return time.monotonic() - began


def _send_bursts(connection: socket.socket) -> float:
    """Send bursts, each confirmed by the other end; return the bytes per second of the quickest."""
    files = list(cpu_stat_files())
    data = memoryview(bytes(LARGEST_BURST))
    size = FIRST_BURST
    best = 0.0
    count = 0
    began = time.monotonic()
    # A very slow link sends fewer bursts, so that it is measured in time.
    while (spent := time.monotonic() - began) < JOIN_LINK_SECONDS or (count < LEAST_BURSTS and spent < 1.0):
        own = OwnTime(files)
        connection.sendall(size.to_bytes(LENGTH_BYTES))
        connection.sendall(data[:size])
        receive(connection, 1)
        best = max(best, size / own.without_others())
        size = min(2 * size, LARGEST_BURST) if own.wall < LEAST_BURST_SECONDS else size
        count += 1
    connection.sendall(bytes(LENGTH_BYTES))
    return best


def _receive_bursts(connection: socket.socket) -> None:
    memory = memoryview(bytearray(LARGEST_BURST))
    while length := int.from_bytes(receive(connection, LENGTH_BYTES)):
        if length > LARGEST_BURST:
            raise ConnectionError(f"a burst of {length} bytes")
        receive_into(connection, memory[:length])
        connection.sendall(OK)
