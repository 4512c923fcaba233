"""What a mutant is, and how its text is found in the tree."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
MOVED: dict[str, str] = {
    package: folder for package, folder in _SETUPTOOLS["package-dir"].items() if folder != package.replace(".", "/")
}
"""Packages whose folder is not that of their name."""


class TableError(Exception):
    """An entry of the table is wrong, not the tests."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One small wrong change that a person could make."""

    name: str
    """`subject.what_is_wrong`, unique."""
    promise: str
    """What no longer holds with it, as a plain sentence."""
    source: Source
    text: str
    """Occurs exactly once in the source."""
    wrong: str
    """What stands there instead."""
    tests: tuple[str, ...]
    """Test files of which one must fail, by their paths from the root."""

    def line(self, text: str) -> int:
        """Line of the change in the source's text."""
        return text.count("\n", 0, text.index(self.text)) + 1

    def applied(self, text: str) -> str:
        """The source's text with the change in it.

        Raises:
            TableError: what is to be changed is not there exactly once.
        """
        times = text.count(self.text)
        if times != 1:
            raise TableError(
                f"mutant {self.name}: its text occurs {times} times in {self.source.path}, not once:\n    "
                + self.text.replace("\n", "\n    ")
                + "\n  The code has changed. Find where this promise is kept now ("
                + self.promise
                + ") and change the entry's text and replacement; do not delete the entry."
            )
        if self.wrong == self.text:
            raise TableError(f"mutant {self.name}: it changes nothing")
        return text.replace(self.text, self.wrong)


@dataclass(frozen=True, slots=True)
class Source:
    """A file of the product, and the fast tests that look at it. Named in one place: files move."""

    where: str
    """Dotted name of the module, or a path from the root for what is not Python."""
    tests: tuple[str, ...]

    @property
    def path(self) -> str:
        """From the root."""
        if "/" in self.where:
            return self.where
        for package, folder in MOVED.items():
            if self.where == package or self.where.startswith(f"{package}."):
                return f"{folder}{self.where.removeprefix(package).replace('.', '/')}.py"
        return f"{self.where.replace('.', '/')}.py"

    def read(self, root: Path) -> str:
        """Its text.

        Raises:
            TableError: there is no such file.
        """
        try:
            return (root / self.path).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise TableError(f"there is no {self.path}: it has moved; name its new place where its Source is") from None

    def mutant(self, name: str, promise: str, text: str, wrong: str, tests: tuple[str, ...] = ()) -> Mutant:
        """`tests`: instead of those that usually look at this file."""
        return Mutant(name, promise, self, text, wrong, tests or self.tests)
