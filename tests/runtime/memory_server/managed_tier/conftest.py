"""A server in this process, and connections to it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serving import serving

from hyperpod_ext.runtime.memory_server.managed_tier.api import ApiServer, holders_of
from hyperpod_ext.runtime.memory_server.managed_tier.blobs import Blobs

SECRET = b"0123456789abcdef0123456789abcdef"
MIB = 1 << 20


class Client:
    """One connection, used for all requests unless the server closes it."""

    def __init__(self, server: ApiServer) -> None:
        self.blobs = server.blobs
        self.connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status, and the answer's JSON or bytes."""
        self.connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
        self.answer = self.connection.getresponse()
        content = self.answer.read()
        is_json = self.answer.headers["Content-Type"] == "application/json"
        return self.answer.status, json.loads(content) if is_json else content


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """Has a budget of 8 MiB, and a namespace `job` of two ranks and the metadata."""
    blobs = Blobs(budget=8 * MIB, usable_bytes=lambda: 100 * MIB)
    blobs.create("job", 3, 3)
    made = ApiServer("127.0.0.1", 0, blobs, holders_of(SECRET))
    with serving(made):
        yield made


@pytest.fixture
def connect(server: ApiServer) -> Iterator[Callable[[], Client]]:
    clients: list[Client] = []

    def new() -> Client:
        clients.append(Client(server))
        return clients[-1]

    yield new
    for client in clients:
        client.connection.close()


@pytest.fixture
def call(connect: Callable[[], Client]) -> Client:
    return connect()
