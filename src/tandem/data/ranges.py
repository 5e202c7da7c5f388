"""Read ranges of bytes from http(s):// and s3:// addresses; a range arrives complete or raises an error.

Transient failures (5xx, a reset, a stall) are retried until a deadline. All others are final at once: a
missing file, a server without ranges, a file that is shorter than expected.
"""

import http.client
import random
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import SplitResult, urljoin, urlsplit

from tandem.errors import ConfigError, DataUnavailableError
from tandem.text import first_line
from tandem.timeouts import (
    BLOCK_BACKOFF_SECONDS,
    BLOCK_DEADLINE_SECONDS,
    BLOCK_STALL_SECONDS,
    LONGEST_BLOCK_BACKOFF_SECONDS,
)

SCHEMES = ("http", "https", "s3")
REDIRECTS = (301, 302, 303, 307, 308)
MOST_REDIRECTS = 5
TRANSIENT_STATUSES = (408, 425, 429)
"""Codes below 500 that ask the client to try again."""
CHUNK = 2**18

RETRIED = "retried"
GAVE_UP = "failed"


def is_remote(address: str) -> bool:
    """Return True for an address that is read over the network, False for a path."""
    return "://" in address


def check_address(address: str) -> None:
    """Raise ConfigError for an unknown scheme, and for a password, which would appear in logs and files."""
    parts = urlsplit(address)
    if parts.scheme not in SCHEMES or not parts.hostname:
        valid = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(f"invalid address {redacted_url(address)}; expected a path or one of {valid}")
    if parts.password is not None:
        raise ConfigError(f"the address {redacted_url(address)} contains a password; remove it")


def redacted_url(address: str) -> str:
    """Return an address for messages: without user, password and query, which may contain a signature."""
    if not is_remote(address):
        return address
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def ignore(outcome: str) -> None:
    """Do nothing: the default for `count`."""


class RangeReader:
    """Reads ranges; thread-safe, with one connection per thread and server.

    A range that cannot be read within `deadline` seconds is an error. `count(outcome)` is called for every
    request that fails: RETRIED if another one follows, else GAVE_UP.
    """

    def __init__(
        self, deadline: float = BLOCK_DEADLINE_SECONDS, count: Callable[[str], None] = ignore
    ) -> None:
        self.deadline = deadline
        self._count = count
        self._local = threading.local()
        self._tls: ssl.SSLContext | None = None
        self._s3: Any = None
        self._lock = threading.Lock()

    def read(self, address: str, offset: int, length: int) -> memoryview:
        """Return `length` >= 1 bytes from `offset` on, in memory that this thread's next call reuses.

        Raises ConfigError if the server refuses the range for good, and DataUnavailableError if no complete
        answer arrives within the deadline.
        """
        return self._repeated(address, f"bytes {offset} to {offset + length - 1}", offset, length)[0]

    def size(self, address: str) -> int:
        """Return the number of bytes of a file. Raises as `read`."""
        if urlsplit(address).scheme == "s3":
            client = self._s3_client()
            return int(self._s3_call(address, lambda: client.info(address)["size"]))
        return self._repeated(address, "its size", 0, 1)[1]

    def _repeated(self, address: str, what: str, offset: int, length: int) -> tuple[memoryview, int]:
        end = time.monotonic() + self.deadline
        pause = BLOCK_BACKOFF_SECONDS
        while True:
            try:
                return self._once(address, offset, length, end)
            except ConfigError:
                self._count(GAVE_UP)
                raise
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() + pause >= end:
                    self._count(GAVE_UP)
                    self._give_up(address, what, error)
                self._count(RETRIED)
            # Add a random delay: ranks that failed together should not retry together.
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_BLOCK_BACKOFF_SECONDS)

    def _give_up(self, address: str, what: str, error: Exception) -> NoReturn:
        raise DataUnavailableError(
            f"cannot read {redacted_url(address)}, {what}: no complete answer for {self.deadline:g} s; "
            f"the last problem: {first_line(error)}"
        ) from error

    def _once(self, address: str, offset: int, length: int, end: float) -> tuple[memoryview, int]:
        """Return the range and the file's size after one request."""
        if urlsplit(address).scheme == "s3":
            return self._from_s3(address, offset, length)
        target = address
        for _ in range(MOST_REDIRECTS + 1):
            parts = urlsplit(target)
            connection = self._connection(parts, end)
            try:
                response = _asked(connection, parts, offset, length)
                location = response.getheader("Location")
                if response.status not in REDIRECTS or not location:
                    size = _checked(response, address, offset, length)
                    return _body(response, self._memory(length), end), size
                response.read()
            except BaseException:
                # The next request would read the rest of this answer as its own.
                self._drop(parts)
                raise
            target = urljoin(target, location)
            check_address(target)
        raise ConfigError(f"{redacted_url(address)}: the server redirects more than {MOST_REDIRECTS} times")

    def _connection(self, parts: SplitResult, end: float) -> http.client.HTTPConnection:
        found: dict[tuple[str, str], http.client.HTTPConnection] = self._local.__dict__.setdefault("open", {})
        key = (parts.scheme, parts.netloc)
        # The timeout is never 0, which would mean a non-blocking socket.
        timeout = min(BLOCK_STALL_SECONDS, max(0.1, end - time.monotonic()))
        if key not in found:
            host = parts.netloc.rpartition("@")[2]
            if parts.scheme == "https":
                found[key] = http.client.HTTPSConnection(host, timeout=timeout, context=self._context())
            else:
                found[key] = http.client.HTTPConnection(host, timeout=timeout)
        elif found[key].sock is not None:
            found[key].sock.settimeout(timeout)
        found[key].timeout = timeout
        return found[key]

    def _memory(self, length: int) -> memoryview:
        """Return memory of this thread. New memory for each answer would cost a page fault per 4 KiB."""
        if len(self._local.__dict__.get("memory", b"")) < length:
            self._local.memory = bytearray(length)
        return memoryview(self._local.memory)[:length]

    def _drop(self, parts: SplitResult) -> None:
        connection = self._local.open.pop((parts.scheme, parts.netloc), None)
        if connection is not None:
            connection.close()

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            # Reading the certificates takes 20 ms.
            self._tls = self._tls or ssl.create_default_context()
            return self._tls

    def _from_s3(self, address: str, offset: int, length: int) -> tuple[memoryview, int]:
        client = self._s3_client()
        data = self._s3_call(address, lambda: client.cat_file(address, start=offset, end=offset + length))
        if len(data) < length:
            raise _shorter(address, offset, length, f"{len(data)} bytes")
        return memoryview(data), 0

    def _s3_call(self, address: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (FileNotFoundError, PermissionError) as error:
            reason = "there is no such object" if isinstance(error, FileNotFoundError) else first_line(error)
            raise ConfigError(f"{redacted_url(address)}: {reason}") from error
        except OSError:
            raise
        except Exception as error:  # botocore and aiohttp have their own classes
            raise OSError(f"{type(error).__name__}: {error}") from error

    def _s3_client(self) -> Any:
        with self._lock:
            if self._s3 is None:
                try:
                    import fsspec.config

                    # The user's own options stay, such as those in FSSPEC_S3.
                    own = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
                    limits = {"read_timeout": BLOCK_STALL_SECONDS, "connect_timeout": BLOCK_STALL_SECONDS}
                    self._s3 = fsspec.filesystem(
                        "s3", config_kwargs={**own, **limits}, skip_instance_cache=True
                    )
                    # This class makes the retries, because it knows the deadline.
                    self._s3.retries = 1
                except ImportError as error:
                    raise ConfigError(
                        "s3:// needs a library that is not installed; pip install 'tandem-train[s3]'"
                    ) from error
            return self._s3


def _asked(
    connection: http.client.HTTPConnection, parts: SplitResult, offset: int, length: int
) -> http.client.HTTPResponse:
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    # Positions would differ in a compressed answer.
    headers = {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
    connection.request("GET", target, headers=headers)
    return connection.getresponse()


def _checked(response: http.client.HTTPResponse, address: str, offset: int, length: int) -> int:
    """Return the file's size from the head of an answer. Raises ConfigError if no other attempt can help."""
    status = response.status
    if status >= 500 or status in TRANSIENT_STATUSES:
        raise OSError(f"the server answered {status} {response.reason}")
    if status == 200:
        raise ConfigError(
            f"{redacted_url(address)}: the server ignores ranges (it answered 200 instead of 206); "
            "use a server that supports the header Range"
        )
    if status == 416:
        raise _shorter(address, offset, length, "416 Range Not Satisfiable")
    if status != 206:
        raise ConfigError(f"{redacted_url(address)}: the server answered {status} {response.reason}")
    got = response.getheader("Content-Range", "")
    span, _, size = got.removeprefix("bytes ").partition("/")
    if span != f"{offset}-{offset + length - 1}":
        raise _shorter(address, offset, length, f"Content-Range {got!r}")
    return int(size) if size.isdigit() else 0


def _body(response: http.client.HTTPResponse, memory: memoryview, end: float) -> memoryview:
    """Fill `memory` with the answer, and return it."""
    # Most answers are received straight into `memory`; those sent in chunks have sizes in between.
    is_plain = not response.chunked and response.length == len(memory)
    got = 0
    while got < len(memory):
        # A server that sends an occasional byte never reaches the socket's timeout.
        if time.monotonic() > end:
            raise TimeoutError(f"only {got} of {len(memory)} bytes arrived")
        part = memory[got : got + CHUNK]
        if is_plain:
            received = response.fp.readinto1(part)
            response.length = len(memory) - got - received
        else:
            read = response.read1(len(part))
            received = len(read)
            part[:received] = read
        if not received:
            raise ConnectionResetError(f"the connection ended after {got} of {len(memory)} bytes")
        got += received
    # Read the end of the answer, so that the connection can serve the next request.
    response.read()
    return memory


def _shorter(address: str, offset: int, length: int, got: str) -> ConfigError:
    return ConfigError(
        f"{redacted_url(address)}: expected bytes {offset} to {offset + length - 1}, got {got}; "
        "if the file has changed, run `tandem index` again"
    )
