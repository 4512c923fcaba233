"""Differences between two versions of the job state. Candidates (agents with a copy of the job state) receive only
differences. Pure functions.

A job state is a JSON object. A change is a path of keys with the new value, or only the path if the last key of the
path was removed. The coordinator and each candidate compute a digest of all changes since the full job state was last
sent. A candidate whose digest differs from the coordinator's has missed a change, and requests the full job state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Path = tuple[str, ...]
StateChange = tuple[Path, Any] | tuple[Path]
"""Path of keys to a changed value, and the new value; only the path if the last key was removed."""

GONE = object()


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[StateChange]:
    """Return the changes from `before` to `after`. JSON objects are compared key by key. Any other differing value is
    one change."""
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
    """Return a copy of `state` with the changes `made` applied. Does not modify `state` and its nested objects.

    Raises:
        KeyError: the path of a change contains a key that does not exist in `state`.
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
    """Return the new state's own copy of the JSON object at `path`. Makes the copy if it does not exist yet."""
    if path not in copied:
        above = _copy_of(copied, path[:-1])
        inner = above[path[-1]]
        if not isinstance(inner, dict):
            raise KeyError(path[-1])
        copied[path] = above[path[-1]] = dict(inner)
    return copied[path]


def chained(digest: str, made: Sequence[StateChange]) -> str:
    """Return the digest of all changes so far: the changes before, whose digest is `digest`, and the changes `made`."""
    text = json.dumps([digest, made], separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
