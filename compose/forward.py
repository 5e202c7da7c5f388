"""Forward TCP connections: `forward.py PORT HOST:PORT [NAME]`. Runs in a container, standard library only.

HOST is resolved for each connection, so a node that returns with another address is found. With NAME, a name
that all nodes share, it exits once the name has not resolved for a while, because the job is over.
"""

import asyncio
import contextlib
import signal
import sys

CHUNK_BYTES = 64 * 1024
POLL_SECONDS = 1.0
GONE_SECONDS = 20.0  # longer than a restart of a node by Docker
START_SECONDS = 120.0  # until the first node is up


async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy everything from source to target, then its end of file."""
    with contextlib.suppress(OSError):
        while chunk := await source.read(CHUNK_BYTES):
            target.write(chunk)
            await target.drain()
        target.write_eof()


async def until_gone(name: str, start: float, poll: float) -> None:
    """Wait until the name has not resolved for GONE_SECONDS, or for `start` seconds after the start."""
    clock, patience = asyncio.get_running_loop(), start
    known_at = clock.time()
    while clock.time() - known_at < patience:
        await asyncio.sleep(poll)
        with contextlib.suppress(OSError):
            await clock.getaddrinfo(name, None)
            known_at, patience = clock.time(), GONE_SECONDS


async def run(
    port: int,
    host: str,
    host_port: int,
    name: str = "",
    start: float = START_SECONDS,
    poll: float = POLL_SECONDS,
) -> None:
    """Serve until canceled, or until the name is gone."""
    tasks = [asyncio.create_task(serve(port, host, host_port))]
    tasks += [asyncio.create_task(until_gone(name, start, poll))] if name else []
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    done.pop().result()  # raises the task's exception, if any


async def serve(port: int, host: str, host_port: int) -> None:
    """Listen until canceled; close connections whose target does not answer."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there_reader, there_writer = await asyncio.open_connection(host, host_port)
            await asyncio.gather(copy(reader, there_writer), copy(there_reader, writer))
            there_writer.close()
        writer.close()

    async with await asyncio.start_server(connected, "0.0.0.0", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    host, _, number = sys.argv[2].rpartition(":")
    asyncio.run(run(int(sys.argv[1]), host, int(number), "".join(sys.argv[3:4])))
