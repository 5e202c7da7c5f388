"""An HTTP proxy before an object store, in a process of its own: counts requests, and does damage on purpose.

    python proxy.py PORT UPSTREAM_PORT CONTROL.json

CONTROL.json is read at every request: {"rule": NAME, "at": [numbers], "every": n, "victim": pid}; `at` and
`every` say which requests (from 0) are hit. Requests are counted in the file CONTROL.json.count.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

ANSWER = "HTTP/1.1 {code} Injected\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
BODY = "<Error><Code>{name}</Code><Message>injected</Message></Error>"


class Proxy:
    def __init__(self, upstream: int, control: Path) -> None:
        self.upstream, self.control, self.count = upstream, control, 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self.one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    async def one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"expect: 100-continue" in head.lower():
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = b"\r\n".join(
                line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect")
            )
        body = await self.body(head, reader)
        rule = self.rule()
        if rule == "kill before":
            os.kill(self.settings["victim"], signal.SIGKILL)
            return False
        if rule in ("500", "503"):
            text = BODY.format(name="InternalError" if rule == "500" else "SlowDown")
            writer.write(ANSWER.format(code=rule, length=len(text), body=text).encode())
            await writer.drain()
            return False
        if rule == "reset":
            writer.transport.abort()
            return False
        if rule == "stall":
            await asyncio.sleep(30)
            return False
        cut = rule == "truncate" and len(body) > 64
        answer = await self.ask(head, body[: len(body) // 2] if cut else body)
        if rule == "kill after":
            os.kill(self.settings["victim"], signal.SIGKILL)
            return False
        if rule == "lose answer":
            writer.transport.abort()
            return False
        if rule == "cut answer" and len(answer) > 400:
            writer.write(answer[: len(answer) - 100])
            await writer.drain()
            writer.transport.abort()
            return False
        writer.write(answer)
        await writer.drain()
        return b"connection: close" not in head.lower() and b"connection: close" not in answer.lower()

    def rule(self) -> str | None:
        self.settings: dict[str, Any] = json.loads(self.control.read_text() or "{}")
        number, self.count = self.count, self.count + 1
        self.control.with_suffix(".count").write_text(str(self.count))
        number -= self.settings.get("since", 0)
        every = self.settings.get("every")
        hit = number in self.settings.get("at", []) or (every and number % every == every - 1)
        return self.settings.get("rule") if hit and number >= 0 else None

    async def body(self, head: bytes, reader: asyncio.StreamReader) -> bytes:
        fields = {}
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            fields[name.strip().lower()] = value.strip()
        if b"content-length" in fields:
            return await reader.readexactly(int(fields[b"content-length"]))
        raw = b""
        while fields.get(b"transfer-encoding", b"").lower() == b"chunked":
            size = await reader.readline()
            chunk = await reader.readexactly(int(size.split(b";")[0], 16) + 2)
            raw += size + chunk
            if int(size.split(b";")[0], 16) == 0:
                break
        return raw

    async def ask(self, head: bytes, body: bytes) -> bytes:
        """The upstream's whole answer. A truncated body is announced as if that were all."""
        lines = head.rstrip(b"\r\n").split(b"\r\n")
        kept = [line for line in lines if not line.lower().startswith((b"connection", b"content-length"))]
        if any(line.lower().startswith(b"content-length") for line in lines):
            kept.append(b"Content-Length: %d" % len(body))
        reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        writer.write(b"\r\n".join([*kept, b"Connection: close", b"", b""]) + body)
        await writer.drain()
        answer = await reader.read(-1)
        writer.close()
        return answer


async def main() -> None:
    port, upstream, control = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    server = await asyncio.start_server(Proxy(upstream, control).serve, "127.0.0.1", port, limit=2**20)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
