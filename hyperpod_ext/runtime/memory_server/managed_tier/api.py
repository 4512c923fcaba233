"""Serves `Blobs` over HTTP/1.1 with the paths, methods and answers of AWS's API. Each connection has its own thread.

A blob is received directly into the memory in which it stays, and is sent from this memory. An error is a JSON object
with the field `detail`. Clients are not authenticated, because AWS's client sends no credentials; the server must
therefore listen on an address that only the job's own nodes can reach. The request that deletes everything is the only
one that requires a token.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import socket
import socketserver
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from hyperpod_ext.errors import ConflictError, MemoryTierFullError, NotFoundError
from hyperpod_ext.runtime.memory_server.managed_tier import shard_meta
from hyperpod_ext.runtime.memory_server.managed_tier.blobs import Blobs

# maximum bytes to receive and hash at once: they fit into the CPU cache, and arrive within the timeout
PIECE = 1 << 20
IDLE_S = 120.0
MAX_RANKS = 1 << 20
MAX_STEPS_RETAINED = 1000
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_NUMBER = re.compile(r"[0-9]{1,18}")
_log = logging.getLogger(__name__)


def reset_token(secret: bytes) -> str:
    """Return the bearer token that a client must send with the request that deletes all blobs."""
    return hmac.new(secret, b"cluster/reset", hashlib.sha256).hexdigest()


def holders_of(secret: bytes) -> Callable[[str], bool]:
    """Return a function that returns whether a token is the reset token derived from `secret`."""
    return lambda token: hmac.compare_digest(token.encode(), reset_token(secret).encode())


class ApiServer(socketserver.ThreadingTCPServer):
    """Serves `blobs` on one address. `may_reset` returns whether a token allows the request that deletes everything."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str, port: int, blobs: Blobs, may_reset: Callable[[str], bool]) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        self.blobs, self.may_reset = blobs, may_reset
        self.algorithms = shard_meta.algorithms()
        super().__init__(address, _Conversation)  # type: ignore[arg-type]  # an IPv4 or IPv6 address

    def handle_error(self, request: Any, client_address: Any) -> None:
        # the client closed the connection between two requests, so no data is lost
        _log.debug("%s went away", client_address, exc_info=True)


class _RefusedError(Exception):
    def __init__(self, status: HTTPStatus, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers


class _Conversation(BaseHTTPRequestHandler):
    """One client connection, which stays open between requests."""

    server: ApiServer
    protocol_version = "HTTP/1.1"
    server_version = "hyperpod-ext"
    sys_version = ""
    timeout = IDLE_S
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._respond()

    do_POST = do_DELETE = do_GET  # noqa: N815  (http.server requires these names)

    def handle_expect_100(self) -> bool:
        return True  # `_put` sends the 100 Continue answer once it has memory for the body

    def log_message(self, *_: Any) -> None:
        pass  # one log line per request would hide the job's own log lines

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that the standard library's HTTP server refuses. The standard library closes the connection
        after the answer."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._answer({"detail": message or explain or status.phrase}, status, Connection="close")

    def _respond(self) -> None:
        self._unread = 0  # number of unread bytes in the request's body
        try:
            self._unread = self._body_length()
            url = urlsplit(self.path)
            query = dict(parse_qsl(url.query))
            self._route([unquote(part) for part in url.path.removesuffix("/").split("/")[1:]], query)
        except OSError:
            self.close_connection = True  # the client has closed the connection
        except _RefusedError as refused:
            self._answer({"detail": refused.detail}, refused.status, **refused.headers)
        except NotFoundError as error:
            self._answer({"detail": error.message}, HTTPStatus.NOT_FOUND)
        except ConflictError as error:
            self._answer({"detail": error.message}, HTTPStatus.CONFLICT)
        except MemoryTierFullError as error:
            self._answer({"detail": error.message}, HTTPStatus.INSUFFICIENT_STORAGE)
        except ValueError as error:
            self._answer({"detail": str(error)}, HTTPStatus.BAD_REQUEST)
        except Exception:
            _log.exception("%s %s failed", self.command, self.path)
            internal = HTTPStatus.INTERNAL_SERVER_ERROR
            self._answer({"detail": "internal error; the server's log has more"}, internal, Connection="close")
        self._drain()

    def _route(self, path: list[str], query: dict[str, str]) -> None:
        routes: dict[str, Callable[[], None]]
        match path:
            case ["v1", "cp", "namespaces", name]:
                routes = {
                    "GET": lambda: self._describe(_named(name)),
                    "POST": lambda: self._create(_named(name), query),
                    "DELETE": lambda: self._delete_namespace(_named(name)),
                }
            case ["v1", "cp", "checkpoints", name, "latest"]:
                routes = {"GET": lambda: self._latest(_named(name), query)}
            case ["v1", "cp", "checkpoints", name, rank, step]:
                place = (_named(name), _number("rank", rank), _number("step", step))
                routes = {
                    "GET": lambda: self._get(*place),
                    "POST": lambda: self._put(*place),
                    "DELETE": lambda: self._delete(*place),
                }
            case ["v1", "cp", "cluster", "reset"]:
                routes = {"POST": self._reset}
            case ["health"]:
                routes = {"GET": lambda: self._answer({"status": "healthy"})}
            case _:
                raise NotFoundError("no such path; the paths of AWS's API begin with /v1/cp/")
        if self.command not in routes:
            raise _RefusedError(
                HTTPStatus.METHOD_NOT_ALLOWED, f"{self.command} is not allowed for this path", Allow=", ".join(routes)
            )
        routes[self.command]()

    def _describe(self, name: str) -> None:
        found = self.server.blobs.namespace(name)
        self._answer({"num_ranks": found.num_ranks, "steps_to_retain_per_rank": found.steps_to_retain_per_rank})

    def _create(self, name: str, query: dict[str, str]) -> None:
        num_ranks = _number("num_ranks", query.get("num_ranks", ""), 1, MAX_RANKS)
        retained = _number("steps_retained", query.get("steps_retained", "3"), 1, MAX_STEPS_RETAINED)
        self.server.blobs.create(name, num_ranks, retained)
        self._answer({"status": "created"})

    def _delete_namespace(self, name: str) -> None:
        self.server.blobs.delete_namespace(name)
        self._answer({"status": "deleted"})

    def _latest(self, name: str, query: dict[str, str]) -> None:
        self._answer(self.server.blobs.latest(name, _number("limit", query.get("limit", "5"), 1)))

    def _put(self, name: str, rank: int, step: int) -> None:
        header = self.headers.get("Shard-Meta", "")
        if not header.isprintable():  # clients receive this header, so it must have no line breaks
            raise ValueError("Shard-Meta has characters that are not printable")
        algorithm, digest, _ = shard_meta.decode(header) if header else ("", b"", {})
        checksum = self.server.algorithms[algorithm]() if algorithm in self.server.algorithms else None
        if "Content-Length" not in self.headers:
            raise _RefusedError(HTTPStatus.LENGTH_REQUIRED, "a checkpoint needs a Content-Length", Connection="close")
        with self.server.blobs.arriving(name, rank, self._unread) as blob:
            if self.headers.get("Expect", "").lower() == "100-continue":
                self.send_response_only(HTTPStatus.CONTINUE)
                self.end_headers()
            self._receive(blob.memory, checksum)
            if checksum is not None and not hmac.compare_digest(checksum.digest(), digest):
                raise ValueError(f"the {len(blob.memory)} bytes do not match the {algorithm} in Shard-Meta")
            self.server.blobs.keep(name, rank, step, blob, header)
        self._answer({"status": "ok"})

    def _get(self, name: str, rank: int, step: int) -> None:
        with self.server.blobs.reading(name, rank, step) as blob:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(len(blob.memory)))
            if blob.shard_meta:
                self.send_header("Shard-Meta", blob.shard_meta)
            self.end_headers()
            for start in range(0, len(blob.memory), PIECE):
                with blob.memory[start : start + PIECE] as piece:
                    self.connection.sendall(piece)

    def _delete(self, name: str, rank: int, step: int) -> None:
        self.server.blobs.delete(name, rank, step)
        self._answer({"status": "deleted"})

    def _reset(self) -> None:
        if not self.server.may_reset(self.headers.get("Authorization", "").removeprefix("Bearer ")):
            raise _RefusedError(
                HTTPStatus.UNAUTHORIZED,
                "a reset of everything needs `Authorization: Bearer` with the token of the job's secret",
                **{"WWW-Authenticate": "Bearer"},
            )
        self.server.blobs.reset()
        self._answer({"status": "reset"})

    def _body_length(self) -> int:
        if "Transfer-Encoding" in self.headers:
            self.close_connection = True  # this server does not parse chunked bodies
            raise _RefusedError(HTTPStatus.LENGTH_REQUIRED, "chunked bodies are not supported; send a Content-Length")
        lengths = self.headers.get_all("Content-Length", ["0"])
        if len(lengths) != 1 or not _NUMBER.fullmatch(lengths[0].strip()):
            self.close_connection = True
            raise _RefusedError(HTTPStatus.BAD_REQUEST, f"Content-Length is not a number: {', '.join(lengths)!r:.80}")
        return int(lengths[0])

    def _receive(self, memory: memoryview, checksum: shard_meta.Checksum | None = None) -> None:
        """Fill `memory` from the request's body. Bytes that `rfile` has not buffered yet are received directly into
        `memory`."""
        for start in range(0, len(memory), PIECE):
            with memory[start : start + PIECE] as piece:
                received = self.rfile.readinto(piece)
                self._unread -= received
                if received < len(piece):
                    raise ConnectionError("the body ended early")
                if checksum is not None:
                    checksum.update(piece)

    def _drain(self) -> None:
        """Read the rest of a refused request's body, because clients read the answer only after sending the whole
        body."""
        if self._unread and self.headers.get("Expect", "").lower() == "100-continue":
            self.close_connection = True  # close, because the client may or may not still send its body
        scratch = memoryview(bytearray(min(self._unread, PIECE)))
        try:
            while self._unread and not self.close_connection:
                self._receive(scratch[: self._unread])
        except OSError:
            self.close_connection = True

    def _answer(self, content: Any, status: HTTPStatus = HTTPStatus.OK, **headers: str) -> None:
        body = json.dumps(content).encode()
        try:
            self.send_response(status)
            for header, value in headers.items():
                self.send_header(header, value)
            if self.close_connection and "Connection" not in headers:
                self.send_header("Connection", "close")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True


def _named(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(f"namespace {text!r:.80} is not 1 to 256 letters, digits, `_`, `-` and `.`")
    return text


def _number(what: str, text: str, least: int = 0, most: int = 10**18) -> int:
    if not _NUMBER.fullmatch(text) or not least <= int(text) <= most:
        raise ValueError(f"{what}={text!r:.80} is not a number from {least} to {most}")
    return int(text)
