"""Changes of the job state. Candidates receive the changes instead of the full job state. Pure functions.

A job state is a JSON object. A change has a path of keys and the new value, or only the path if the key was removed. A
digest is chained through all changes since the full job state was sent. A candidate whose digest differs has missed a
change, so it requests the full job state again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Path = tuple[str, ...]
StateChange = tuple[Path, Any] | tuple[Path]
"""Path and new value of a key; only the path if the key was removed."""

GONE = object()


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[StateChange]:
    """Return the changes from `before` to `after`. Objects are compared key by key, any other value as a whole."""
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
    """Return a copy of `state` with these changes applied. `state` and its nested objects stay unchanged.

    Raises:
        KeyError: a path contains a key that does not exist.
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
    """Return the copy of the object at `path` that belongs to the new state."""
    if path not in copied:
        above = _copy_of(copied, path[:-1])
        inner = above[path[-1]]
        if not isinstance(inner, dict):
            raise KeyError(path[-1])
        copied[path] = above[path[-1]] = dict(inner)
    return copied[path]


def chained(digest: str, made: Sequence[StateChange]) -> str:
    """Return the digest after these changes. `digest`: the digest before them."""
    text = json.dumps([digest, made], separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
