"""Ports for processes that are started later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hyperpod_ext import ports


def test_a_free_port_is_none_that_the_kernel_gives_away() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = {ports.free_port() for _ in range(20)}
    assert all(1024 < port < lowest for port in found)
    assert len(found) > 1


def test_one_that_is_taken_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        tried = iter([port, port, 12345])
        monkeypatch.setattr(ports.random, "randrange", lambda *_: next(tried))
        monkeypatch.setattr(ports, "_can_listen", lambda host, tried: tried != port)
        assert ports.free_port() == 12345


def test_where_the_kernel_has_them_all_one_of_its_own_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_can_listen", lambda host, port: False)
    assert ports.free_port() > 0
