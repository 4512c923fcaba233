"""An HTTP proxy that misbehaves on order: slow, refusing, throttling, cutting uploads and answers, flipping a bit.

It reads requests one by one, also on connections that are kept, so that a fault strikes the requests it is meant for,
a given number of times, and so that tests can count what a client sent.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urlsplit

CHUNK = 1 << 16
NO_LINGER = struct.pack("ii", 1, 0)  # close sends RST


@dataclass
class Faults:
    """What goes wrong, for requests that `only` is found in ("PUT /bucket/key?partNumber=2...")."""

    only: str = ""
    """A regular expression."""
    times: int = 1 << 30
    """How many requests are struck before everything is well again."""
    chance: float = 1.0
    """Of a request that could be struck to be struck."""
    seed: int = 0

    latency_s: float = 0.0
    """Before each request is passed on."""
    refuse: bool = False
    """Cut the connection at once."""
    status: int = 0
    """Answer with this, and pass nothing on: 503."""
    code: str = "SlowDown"
    """The S3 error code of such an answer."""
    cut_upload_after: int | None = None
    """Cut both sides after so many bytes of a request's body."""
    cut_answer_after: int | None = None
    """Cut the client off after so many bytes of an answer's body; 0 hides the answer to a request that was done."""
    flip_at: int | None = None
    """Flip a bit of this byte of an answer's body."""


@dataclass
class Seen:
    """One request, as it came."""

    line: str
    """"PUT /bucket/key?query"."""
    nbytes: int = 0
    """Bytes of its body that came."""
    status: int = 0
    """What the server answered; 0 when it was not asked, or did not."""
    struck: bool = False


@dataclass
class FaultProxy:
    upstream: str
    faults: Faults = field(default_factory=Faults)
    seen: list[Seen] = field(default_factory=list)

    def __enter__(self) -> FaultProxy:
        started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._random = random.Random(0)
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def order(self, faults: Faults) -> None:
        """From now on this goes wrong, and what was seen is forgotten."""
        self._random = random.Random(faults.seed)
        self.seen.clear()
        self.faults = faults

    def count(self, pattern: str) -> int:
        """Requests seen whose line matches."""
        return sum(1 for seen in [*self.seen] if re.search(pattern, seen.line))

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20))
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        self._loop.run_forever()
        server.close()
        for task in (tasks := asyncio.all_tasks(self._loop)):
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place = urlsplit(self.upstream)
        up_writer: asyncio.StreamWriter | None = None
        try:
            up_reader, up_writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 20)
            while await self._exchange(reader, writer, up_reader, up_writer):
                pass
        except (OSError, asyncio.IncompleteReadError):
            _reset(writer)
        except asyncio.CancelledError:
            pass  # the proxy ends
        finally:
            for end in (writer, up_writer):
                if end:
                    end.close()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter,
    ) -> bool:
        """One request and its answer; False when the connection is to be closed."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        seen = Seen(" ".join(head.split(b"\r\n")[0].decode().split(" ")[:2]))
        faults = self._strike(seen)
        await asyncio.sleep(faults.latency_s)
        if faults.refuse:
            raise ConnectionResetError
        if faults.status:
            writer.write(_answer(faults.status, faults.code))
            await writer.drain()
            writer.write_eof()  # a client that is still sending reads the answer first
            with suppress(asyncio.TimeoutError):
                while await asyncio.wait_for(reader.read(CHUNK), 1):
                    pass
            return False
        up_writer.write(head)
        answering = asyncio.create_task(self._pass_answer(up_reader, writer, seen, faults))
        try:
            left = _length(head)
            while left and not answering.done():  # a server may refuse before it has read all
                ours = asyncio.ensure_future(reader.read(min(left, CHUNK)))
                await asyncio.wait({ours, answering}, return_when=asyncio.FIRST_COMPLETED)
                if not ours.done():
                    ours.cancel()
                    break
                piece = ours.result()
                seen.nbytes += len(piece)
                left -= len(piece)
                if not piece or (faults.cut_upload_after is not None and seen.nbytes > faults.cut_upload_after):
                    raise ConnectionResetError
                up_writer.write(piece)
                await up_writer.drain()
            return await answering and not left
        finally:
            answering.cancel()

    async def _pass_answer(
        self, up_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: Seen, faults: Faults
    ) -> bool:
        while True:
            head = await up_reader.readuntil(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            if status != 100:
                break
            writer.write(head)
        seen.status = status
        if faults.cut_answer_after == 0:
            raise ConnectionResetError
        writer.write(head)
        empty = seen.line.startswith("HEAD ") or status in (204, 304)
        left, passed = 0 if empty else _length(head), 0
        while left:
            piece = bytearray(await up_reader.read(min(left, CHUNK)))
            if not piece:
                raise ConnectionResetError
            if faults.flip_at is not None and passed <= faults.flip_at < passed + len(piece):
                piece[faults.flip_at - passed] ^= 1
            if faults.cut_answer_after is not None and passed + len(piece) > faults.cut_answer_after:
                writer.write(piece[: faults.cut_answer_after - passed])
                await writer.drain()
                raise ConnectionResetError
            passed += len(piece)
            left -= len(piece)
            writer.write(piece)
            await writer.drain()
        await writer.drain()
        return b"connection: close" not in head.lower()

    def _strike(self, seen: Seen) -> Faults:
        """The faults, if they strike this request; else none."""
        self.seen.append(seen)
        faults = self.faults
        if faults.times and re.search(faults.only, seen.line) and self._random.random() < faults.chance:
            faults.times -= 1
            seen.struck = True
            return faults
        return Faults()


def _length(head: bytes) -> int:
    lower = head.lower()
    assert b"\r\ntransfer-encoding: chunked" not in lower, "the proxy does not speak chunked bodies"
    found = re.search(rb"\r\ncontent-length: *(\d+)", lower)
    return int(found[1]) if found else 0


def _answer(status: int, code: str) -> bytes:
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>ordered by a test</Message></Error>'.encode()
    head = (
        f"HTTP/1.1 {status} -\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    )
    return head.encode() + b"\r\n" + body


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    writer.transport.abort()
