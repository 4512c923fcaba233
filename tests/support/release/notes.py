"""The notes of a release: the section of its version in CHANGELOG.md."""

from __future__ import annotations

import re
from dataclasses import dataclass

from release.steps import StepFailedError

_SECTION = re.compile(r"^## (?P<version>\S+) \((?P<date>[^)]*)\)\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
UNRELEASED = "unreleased"


@dataclass(frozen=True, slots=True)
class Section:
    """The changelog's section of one version."""

    version: str
    date: str
    """The day of the release, as `2026-12-01`, or `unreleased`."""
    text: str

    def notes(self) -> str:
        return f"# hyperpod_ext {self.version} ({self.date})\n\n{self.text.strip()}\n"


def newest(changelog: str) -> Section:
    """Return the first section of the changelog.

    Raises:
        StepFailedError: it has no section, or the first has no date and is not marked as unreleased.
    """
    found = _SECTION.search(changelog)
    if found is None:
        raise StepFailedError("CHANGELOG.md has no section such as `## 0.2.0 (unreleased)`")
    section = Section(**found.groupdict())
    if section.date != UNRELEASED and not _DATE.fullmatch(section.date):
        raise StepFailedError(f"CHANGELOG.md: `{section.date}` is no date; write `2026-12-01` or `{UNRELEASED}`")
    return section
