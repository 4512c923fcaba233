"""Nodes of the peer tier, in this process and in processes of their own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peer_node
import pytest
from peer_node import Node

from hyperpod_ext.runtime.memory_server.replication.nixl_process import MODULES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Modules with `BOTH_TRANSPORTS` run their tests of nodes with each; `make test-nixl` those with NIXL."""
    if getattr(metafunc.module, "BOTH_TRANSPORTS", False) and "transport" in metafunc.fixturenames:
        transports = ["tcp", pytest.param("nixl", marks=pytest.mark.nixl)]
        metafunc.parametrize("transport", transports, indirect=True)


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> str:
    """What copies go by."""
    name = getattr(request, "param", "tcp")
    if name == "nixl" and not any(importlib.util.find_spec(module) for module in MODULES):
        pytest.skip("NIXL is not installed: `make test-nixl` installs it")
    return name


@pytest.fixture
def make_node(transport: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., Node]]:
    """Makes nodes in this process."""
    nodes: list[Node] = []

    def make(number: int, **options: Any) -> Node:
        nodes.append(Node(number, **{"transport": transport, **options}))
        return nodes[-1]

    yield make
    fell_back = [node.replicator.status()["fell_back"] for node in nodes]
    for node in nodes:
        node.close()
    if transport == "nixl" and request.node.get_closest_marker("falls_back") is None:
        assert not any(fell_back), "a test of NIXL has tested TCP"


@pytest.fixture
def start_process(transport: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `peer_node.py` with arguments."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(peer_node.__file__)), transport, *map(str, arguments)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
