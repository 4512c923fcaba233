"""Nodes of the peer tier, in this process and in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peer_node
import pytest
from peer_node import Node


@pytest.fixture
def make_node() -> Iterator[Callable[..., Node]]:
    """Makes nodes in this process."""
    nodes: list[Node] = []

    def make(number: int, **options: Any) -> Node:
        nodes.append(Node(number, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
def start_process() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `peer_node.py` with arguments."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(peer_node.__file__)), *map(str, arguments)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
