"""docs/protocol.md says what is declared."""

from __future__ import annotations

import protocol_page
import pytest


def test_the_page_has_what_is_declared() -> None:
    page = protocol_page.PAGE.read_text()
    assert protocol_page.written(page) == page, "run `make protocol`"


def test_a_line_that_is_gone_would_be_found() -> None:
    page = protocol_page.PAGE.read_text()
    assert protocol_page.written(page.replace("| `map` |", "| `mop` |", 1)) == page
    with pytest.raises(AssertionError, match="0 places for 'peer requests'"):
        protocol_page.written(page.replace("<!-- peer requests -->", ""))


def test_units_and_meanings_of_fields_are_in_it() -> None:
    page = protocol_page.PAGE.read_text()
    assert "`slot_bytes` (integer, bytes): The least that each slot is to hold" in page
    assert "`timeout_s` (number, s): How long the others are given to end." in page
