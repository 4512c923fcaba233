"""A stand-in for EC2's instance metadata, over HTTP: tokens first, and a Spot notice for those nodes that have one."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NOTICE = '{"action": "terminate", "time": "2099-01-01T00:00:00Z"}'


@dataclass
class InstanceMetadata:
    """One for several nodes: each asks below a path of its own."""

    url: str = ""
    notices: dict[str, str] = field(default_factory=dict)
    """What is told, by node."""
    tokens: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    def of(self, node: str) -> str:
        """The endpoint of one node."""
        return f"{self.url}/{node}"


@contextmanager
def instance_metadata() -> Iterator[InstanceMetadata]:
    known = InstanceMetadata()

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            lifetime = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if not self.path.endswith("/latest/api/token") or not lifetime.isdecimal():
                self.answer(400, "")
                return
            known.tokens.add(token := secrets.token_hex(8))
            self.answer(200, token)

        def do_GET(self) -> None:
            known.asked.append(self.path)
            node = self.path.split("/")[1]
            if self.headers.get("X-aws-ec2-metadata-token") not in known.tokens:
                self.answer(401, "")
            elif not self.path.endswith("/latest/meta-data/spot/instance-action") or node not in known.notices:
                self.answer(404, "")
            else:
                self.answer(200, known.notices[node])

        def answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        known.url = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        serving.start()
        yield known
        server.shutdown()
        serving.join()
