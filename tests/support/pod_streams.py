"""`exec` of a pod as API servers since 1.30 serve it to kubectl: channels in messages of a WebSocket (RFC 6455).

The protocol is v5.channel.k8s.io: each message begins with its channel, 0 stdin, 1 stdout, 2 stderr, 3 the end as a
`Status`, 255 a channel that is closed. The command runs on this machine.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import subprocess
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

_PROTOCOL = "v5.channel.k8s.io"
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_BINARY, _CLOSE, _PING, _PONG = 2, 8, 9, 10


def serve_exec(handler: BaseHTTPRequestHandler, command: list[str], stdin: bool) -> None:
    """Take the line over, run the command, and end the line as it ended."""
    offered = [one.strip() for one in handler.headers.get("Sec-WebSocket-Protocol", "").split(",")]
    if _PROTOCOL not in offered:
        handler.send_error(400, f"offers {offered}")
        return
    accept = base64.b64encode(hashlib.sha1(handler.headers["Sec-WebSocket-Key"].encode() + _GUID).digest()).decode()
    handler.send_response(101)
    for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accept)):
        handler.send_header(name, value)
    handler.send_header("Sec-WebSocket-Protocol", _PROTOCOL)
    handler.end_headers()
    handler.close_connection = True
    line = _Line(handler)
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    threading.Thread(target=line.feed, args=(process,), daemon=True).start()
    readers = [
        threading.Thread(target=line.pump, args=(channel, stream))
        for channel, stream in ((1, process.stdout), (2, process.stderr))
    ]
    for one in readers:
        one.start()
    for one in readers:
        one.join()
    line.send(3, json.dumps(_status(process.wait())).encode())
    line.frame(_CLOSE, struct.pack("!H", 1000))


def _status(code: int) -> dict[str, Any]:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    causes = [{"reason": "ExitCode", "message": str(code)}]
    told = {"reason": "NonZeroExitCode", "message": f"command terminated with exit code {code}"}
    return {"metadata": {}, "status": "Failure", **told, "details": {"causes": causes}}


class _Line:
    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self._in, self._out = handler.rfile, handler.wfile
        self._lock = threading.Lock()

    def frame(self, kind: int, content: bytes) -> None:
        length = len(content)
        head = bytes([0x80 | kind, length]) if length < 126 else bytes([0x80 | kind, 126]) + struct.pack("!H", length)
        with self._lock:
            self._out.write(head + content)
            self._out.flush()

    def send(self, channel: int, content: bytes) -> None:
        self.frame(_BINARY, bytes([channel]) + content)

    def pump(self, channel: int, stream: Any) -> None:
        while content := stream.read1(2**15):
            self.send(channel, content)

    def feed(self, process: subprocess.Popen[bytes]) -> None:
        """Bring the client's input to the process, until it closes that channel or the line."""
        while True:
            head = self._in.read(2)
            if len(head) < 2 or head[0] & 15 == _CLOSE:
                break
            length = head[1] & 127
            if length >= 126:
                length = int.from_bytes(self._in.read(2 if length == 126 else 8), "big")
            assert head[1] & 128, "a client masks what it sends"
            mask = self._in.read(4)
            content = bytes(byte ^ mask[at % 4] for at, byte in enumerate(self._in.read(length)))
            if head[0] & 15 == _PING:
                self.frame(_PONG, content)
            elif content[:1] == b"\0" and process.stdin is not None:
                process.stdin.write(content[1:])
                process.stdin.flush()
            elif content == b"\xff\0" and process.stdin is not None:
                process.stdin.close()
