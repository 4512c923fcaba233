"""The tables of docs/faults.md that say how processes of a job can end, and what follows."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"


class Ending(NamedTuple):
    """One row of the table of processes other than ranks."""

    what: str
    how: str
    where: str
    state: str
    exit_code: int
    last_word: str


def endings() -> list[Ending]:
    return [Ending(what, how, where, state, int(code), word) for what, how, where, state, code, word in rows()]


def rows(name: str = "endings of other processes") -> list[list[str]]:
    """The cells of a table, line by line."""
    table = PAGE.read_text().partition(f"<!-- {name} -->")[2].partition("<!-- end -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[3:] if "|" in line]
