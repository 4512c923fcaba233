"""docs/protocol.md has what is declared: its tables are made here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc.declared import Kinds
from hyperpod_ext.runtime.ipc.declared_table import table
from hyperpod_ext.runtime.memory_server.protocol.nixl_requests import NIXL_REQUESTS
from hyperpod_ext.runtime.memory_server.protocol.peer_requests import PEER_REQUESTS
from hyperpod_ext.runtime.memory_server.protocol.requests import REQUESTS

PAGE = "docs/protocol.md"
CONTROL_MESSAGES = Kinds(
    "control message", "type", [c.AgentHandshake, c.AskNumber, c.FreeNumber, *c.AGENT_REPORTS, *c.AGENT_ORDERS]
)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("requests", table(REQUESTS, answer_of=lambda kind: kind.answer_kind())),
        ("peer requests", table(PEER_REQUESTS, answer_of=lambda kind: kind.answer_kind())),
        ("NIXL requests", table(NIXL_REQUESTS, answer_of=lambda kind: kind.answer_kind())),
        ("control messages", table(CONTROL_MESSAGES)),
    ],
    ids=["requests", "peer requests", "NIXL requests", "control messages"],
)
def test_the_page_has_what_is_declared(place: str, text: str, golden_part: Callable[[str, str, str], None]) -> None:
    golden_part(PAGE, place, text)


def test_units_and_meanings_of_fields_are_in_it(root: Path) -> None:
    page = (root / PAGE).read_text()
    assert "`slot_bytes` (integer, in bytes): Minimum size of each slot" in page
    assert "`timeout_s` (number, in s): Maximum number of seconds to wait until the other processes end." in page
