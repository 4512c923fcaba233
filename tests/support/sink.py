"""An S3 that forgets: takes uploads at a socket's speed and throws the bytes away, so that a client's own cost shows.

A process of its own (`python sink.py [--port N]` prints its URL): in the client's process it would share its GIL.
Objects are only sizes, which lists show; a GET answers with that many zero bytes. Checksums are not looked at. For
measuring, not for promises.
"""

from __future__ import annotations

import argparse
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import CDLL, c_int
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

WINDOW = 1 << 20
ETAG = '"00000000000000000000000000000000"'
PR_SET_PDEATHSIG = 1

sizes: dict[str, int] = {}
parts: dict[str, dict[int, int]] = {}


class Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.rest = b""
        self.window = memoryview(bytearray(WINDOW))

    def serve(self) -> None:
        with suppress(ConnectionError), self.sock:
            while self.request():
                pass

    def request(self) -> bool:
        head = self.until(b"\r\n\r\n")
        if not head:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("expect"):
            self.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        url = urlsplit(target)
        query = parse_qs(url.query, keep_blank_values=True)
        nbytes = self.discard_body(headers)
        self.answer(method, unquote(url.path), query, headers, nbytes)
        return True

    def answer(self, method: str, path: str, query: dict[str, list[str]], headers: dict[str, str], nbytes: int) -> None:
        upload = query.get("uploadId", [""])[0]
        if method == "PUT" and upload:
            parts[upload][int(query["partNumber"][0])] = nbytes
            self.reply(200)
        elif method == "PUT":
            sizes[path] = nbytes
            self.reply(200)
        elif method == "POST" and "uploads" in query:
            parts[upload := f"upload-{len(parts)}"] = {}
            self.reply(200, _xml("InitiateMultipartUploadResult", UploadId=upload))
        elif method == "POST" and upload:
            sizes[path] = sum(parts.pop(upload, {}).values())
            self.reply(200, _xml("CompleteMultipartUploadResult", ETag=ETAG))
        elif method == "DELETE":
            parts.pop(upload, None)
            self.reply(204)
        elif method == "GET" and "list-type" in query:
            self.reply(200, _listed(path, query.get("prefix", [""])[0], query.get("delimiter", [""])[0]))
        elif method in ("GET", "HEAD") and path in sizes:
            self.send_zeros(sizes[path], headers.get("range", ""), body=method == "GET")
        else:
            self.reply(404, _xml("Error", Code="NoSuchKey", Message="not here"))

    def reply(self, status: int, body: bytes = b"", extra: str = "") -> None:
        length = "" if "Content-Length" in extra else f"Content-Length: {len(body)}\r\n"
        self.sock.sendall(f"HTTP/1.1 {status} -\r\nETag: {ETAG}\r\n{length}{extra}\r\n".encode() + body)

    def send_zeros(self, size: int, ranged: str, *, body: bool) -> None:
        first, last = 0, size - 1
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", ranged):
            first, last = int(found[1]), min(int(found[2] or last), last)
        extra = f"Content-Length: {last - first + 1}\r\nContent-Range: bytes {first}-{last}/{size}\r\n"
        self.reply(206 if ranged else 200, extra=extra)
        left = last - first + 1 if body else 0
        while left:
            left -= self.sock.send(self.window[: min(left, WINDOW)])

    def discard_body(self, headers: dict[str, str]) -> int:
        if headers.get("transfer-encoding") != "chunked":
            nbytes = int(headers.get("content-length", 0))
            self.discard(nbytes)
            return nbytes
        total = 0
        while size := int(self.until(b"\r\n").split(b";")[0], 16):
            self.discard(size + 2)
            total += size
        while self.until(b"\r\n"):
            pass
        return total

    def discard(self, nbytes: int) -> None:
        taken = min(nbytes, len(self.rest))
        self.rest, nbytes = self.rest[taken:], nbytes - taken
        while nbytes:
            received = self.sock.recv_into(self.window, min(nbytes, WINDOW))
            if not received:
                raise ConnectionError("cut in a body")
            nbytes -= received

    def until(self, end: bytes) -> bytes:
        while end not in self.rest:
            more = self.sock.recv(65536)
            if not more:
                return b""
            self.rest += more
        found, _, self.rest = self.rest.partition(end)
        return found


def _listed(bucket: str, prefix: str, delimiter: str) -> bytes:
    """Objects below `prefix`, all of them in one answer; with `delimiter`, folders in their place."""
    folders, contents = set(), ""
    bucket = bucket.rstrip("/") + "/"
    for path, size in sorted(sizes.items()):
        key = path.removeprefix(bucket)
        if not path.startswith(bucket + prefix):
            continue
        if delimiter and (folder := key[len(prefix) :].partition(delimiter))[1]:
            folders.add(prefix + folder[0] + delimiter)
        else:
            contents += f"<Contents><Key>{key}</Key><Size>{size}</Size></Contents>"
    contents += "".join(f"<CommonPrefixes><Prefix>{each}</Prefix></CommonPrefixes>" for each in sorted(folders))
    head = "<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated>"
    return f"{head}{contents}</ListBucketResult>".encode()


def _xml(tag: str, **fields: str) -> bytes:
    inner = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
    return f'<?xml version="1.0"?><{tag}>{inner}</{tag}>'.encode()


@contextmanager
def running_sink() -> Iterator[str]:
    """URL of a sink in a process of its own, which ends with this one."""
    with subprocess.Popen([sys.executable, str(Path(__file__))], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    CDLL(None).prctl(PR_SET_PDEATHSIG, c_int(signal.SIGKILL))
    server = socket.create_server(("127.0.0.1", arguments.port), backlog=128)
    print(f"http://127.0.0.1:{server.getsockname()[1]}", flush=True)
    while True:
        sock, _ = server.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=Connection(sock).serve, daemon=True).start()


if __name__ == "__main__":
    main()
