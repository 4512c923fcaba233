"""docs/protocol.md has what is declared: its tables are made here."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc.declared import Kinds
from hyperpod_ext.runtime.ipc.declared_table import table
from hyperpod_ext.runtime.memory_server.protocol.peer_requests import PEER_REQUESTS
from hyperpod_ext.runtime.memory_server.protocol.requests import REQUESTS

PAGE = "docs/protocol.md"
CONTROL_MESSAGES = Kinds("control message", "type", [c.AgentHello, *c.AGENT_REPORTS, *c.AGENT_ORDERS])


def tables() -> dict[str, str]:
    """Each table by the name of its place in the page."""
    return {
        "requests": table(REQUESTS, answer_of=lambda kind: kind.answer_kind()),
        "peer requests": table(PEER_REQUESTS, answer_of=lambda kind: kind.answer_kind()),
        "control messages": table(CONTROL_MESSAGES),
    }


def test_the_page_has_what_is_declared(root: Path, golden: Callable[[Path, str], None]) -> None:
    page = (root / PAGE).read_text()
    for name, text in tables().items():
        place = re.compile(f"(<!-- {name} -->\\n).*?(?=<!-- end -->)", re.DOTALL)
        page, found = place.subn(lambda begin, text=text: begin[1] + text, page)
        assert found == 1, f"the page has {found} places for {name!r}"
    golden(root / PAGE, page)


def test_units_and_meanings_of_fields_are_in_it(root: Path) -> None:
    page = (root / PAGE).read_text()
    assert "`slot_bytes` (integer, bytes): The least that each slot is to hold" in page
    assert "`timeout_s` (number, s): How long the others are given to end." in page
