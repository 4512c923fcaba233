"""What has changed of the job state, so that those who have it need not be sent it whole. Pure.

A job state is a JSON object. A change is a path of keys and a value, or a path alone where a key is gone. A digest is
chained through all changes since the whole was sent: who has another one than the sender has missed or mistaken one,
and asks for the whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Path = tuple[str, ...]
StateChange = tuple[Path, Any] | tuple[Path]
"""Where, and what is there now; without a value: nothing."""

GONE = object()


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[StateChange]:
    """What makes `after` of `before`. Objects are compared key by key, anything else as one value."""
    return list(_changes(before, after, ()))


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], path: Path) -> Iterator[StateChange]:
    for key in before.keys() - after.keys():
        yield ((*path, key),)
    for key, value in after.items():
        old = before.get(key, GONE)
        if old is value or old == value:
            continue
        if isinstance(old, dict) and isinstance(value, dict):
            yield from _changes(old, value, (*path, key))
        else:
            yield (*path, key), value


def changed(state: Mapping[str, Any], made: Sequence[StateChange]) -> dict[str, Any]:
    """`state` with these changes; nothing that it consists of is touched.

    Raises:
        KeyError: a path leads through what is not there.
    """
    copied: dict[Path, dict[str, Any]] = {(): dict(state)}
    for change in made:
        path = tuple(change[0])
        at = _copy_of(copied, path[:-1])
        if len(change) == 1:
            del at[path[-1]]
        else:
            at[path[-1]] = change[1]
            copied = {known: value for known, value in copied.items() if known[: len(path)] != path}
    return copied[()]


def _copy_of(copied: dict[Path, dict[str, Any]], path: Path) -> dict[str, Any]:
    """The object at `path`, which is the new state's own."""
    if path not in copied:
        above = _copy_of(copied, path[:-1])
        inner = above[path[-1]]
        if not isinstance(inner, dict):
            raise KeyError(path[-1])
        copied[path] = above[path[-1]] = dict(inner)
    return copied[path]


def chained(digest: str, made: Sequence[StateChange]) -> str:
    """The digest after these changes, from the one before."""
    text = json.dumps([digest, made], separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
