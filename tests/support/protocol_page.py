"""`python tests/support/protocol_page.py`: writes the tables of docs/protocol.md anew, from the declarations."""

from __future__ import annotations

import re
from pathlib import Path

from hyperpod_ext.runtime.ipc.declared_table import table
from hyperpod_ext.runtime.memory_server.protocol.peer_requests import PEER_REQUESTS
from hyperpod_ext.runtime.memory_server.protocol.requests import REQUESTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"


def tables() -> dict[str, str]:
    """Each table by the name of its place in the page."""
    return {
        "requests": table(REQUESTS, answer_of=lambda kind: kind.answer_kind()),
        "peer requests": table(PEER_REQUESTS, answer_of=lambda kind: kind.answer_kind()),
    }


def written(page: str) -> str:
    """The page with every table as it is declared now."""
    for name, text in tables().items():
        place = re.compile(f"(<!-- {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)
        page, found = place.subn(lambda begin, text=text: begin[1] + text, page)
        assert found == 1, f"the page has {found} places for {name!r}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
