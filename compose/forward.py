"""Hand TCP connections on: `forward.py PORT HOST:PORT`. Runs in a container, standard library only.

The name is resolved for each connection, so a node that comes back under another address is found.
"""

import asyncio
import contextlib
import signal
import sys

CHUNK_BYTES = 64 * 1024


async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Everything from source to target, and then the end of it."""
    with contextlib.suppress(OSError):
        while chunk := await source.read(CHUNK_BYTES):
            target.write(chunk)
            await target.drain()
        target.write_eof()


async def serve(port: int, host: str, host_port: int) -> None:
    """Listen until cancelled; a connection whose target does not answer is closed."""

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
    name, _, number = sys.argv[2].rpartition(":")
    asyncio.run(serve(int(sys.argv[1]), name, int(number)))
