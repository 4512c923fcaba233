"""Sections of the record: each yields keys with JSON values, which stand in tests/observed/SECTION.json."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from typing import Any

from observed import commands, errors, names, protocol, requests, specs
from observed.pool import FOLDER, Text, compact

Section = Callable[[bool], Iterator[tuple[str, Any]]]
SECTIONS: dict[str, Section] = {
    "examples": specs.examples,
    "specs": specs.specs,
    "wrong": specs.mistakes,
    "messages": protocol.messages,
    "outputs": protocol.outputs,
    "options": commands.options,
    "commands": commands.commands,
    "requests": requests.requests,
    "names": names.names,
    "errors": errors.errors,
}
"""With True, a section yields the part of its keys that is quick."""
_MOST_LINES = 60


def observe(section: str, *, fast: bool = False, whole: bool = False) -> dict[str, Any]:
    """The section as the code shows it now; long texts are digests unless `whole`."""
    found = dict(SECTIONS[section](fast))
    plain: dict[str, Any] = json.loads(json.dumps(found if whole else _digested(found), sort_keys=True))
    return plain


def recorded(section: str) -> dict[str, Any]:
    """The section as it was recorded; empty if it never was."""
    file = FOLDER / f"{section}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def write(section: str, found: dict[str, Any]) -> None:
    """Record a section, one key a line."""
    lines = ",\n".join(f"{json.dumps(key)}: {compact(found[key])}" for key in sorted(found) if found[key] is not None)
    (FOLDER / f"{section}.json").write_text(f"{{\n{lines}\n}}\n")


def differences(section: str, before: dict[str, Any], now: dict[str, Any], *, fast: bool = False) -> list[str]:
    """One text for each key that differs. With `fast`, keys that were not looked at are left out."""
    keys = now.keys() if fast else before.keys() | now.keys()
    return [
        f"{section}: {key}\n" + "\n".join(_lines_between(before.get(key), now.get(key)))
        for key in sorted(keys)
        if before.get(key) != now.get(key)
    ]


def _lines_between(before: Any, now: Any) -> list[str]:
    found = list(difflib.unified_diff(_lines(before), _lines(now), n=1, lineterm=""))[2:]
    more = [f"  ... {len(found) - _MOST_LINES} more lines"] if len(found) > _MOST_LINES else []
    return ["  " + line for line in found[:_MOST_LINES]] + more


def _lines(value: Any) -> list[str]:
    if value is None:
        return []
    text = value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False)
    return [part for line in text.splitlines() for part in line.split("\\n")]


def _digested(value: Any) -> Any:
    if isinstance(value, Text):
        return f"#{sha256(value.encode()).hexdigest()[:8]}"
    if isinstance(value, dict):
        return {key: _digested(one) for key, one in value.items()}
    return [_digested(one) for one in value] if isinstance(value, list | tuple) else value


def changed(sections: Iterable[str], *, fast: bool = False) -> list[str]:
    """All differences between the record and the code."""
    return [
        one
        for section in sections
        for one in differences(section, recorded(section), observe(section, fast=fast), fast=fast)
    ]
