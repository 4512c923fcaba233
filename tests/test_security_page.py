"""docs/security.md: each line has a test that there is, or says that it is not defended."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "security.md"
PARTIES = ("The job's ranks", "Another job", "Another user", "Write access", "Read access", "The network")


def rows(text: str) -> list[list[str]]:
    """Cells of each row of each table, without titles."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [cells for cells in lines if cells[0] != "action"]


def known_tests() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found |= set(re.findall(r"def (test_\w+)\(", path.read_text()))
    return found


def test_each_line_has_a_test_or_is_said_to_be_not_defended() -> None:
    found = rows(PAGE.read_text())
    assert len(found) > 20
    for cells in found:
        assert len(cells) == 3, cells
        assert re.fullmatch(r"`test_\w+`|not defended", cells[2]), cells


def test_the_tests_that_are_named_are_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    assert named
    assert named - known_tests() == set()


def test_every_party_has_a_table() -> None:
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    for party in PARTIES:
        assert [section for section in sections if section.startswith(party) and rows(section)], party


def test_who_reads_security_md_is_led_to_a_private_report() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert "Report a vulnerability" in text
    assert "docs/security.md" in text
