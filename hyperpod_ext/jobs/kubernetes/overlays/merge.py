"""Applies strategic merge patches, by the rules that Kubernetes publishes. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from hyperpod_ext.catalog.pod_fields import DIRECTIVE, MERGE_KEYS, RETAIN

_KEYS = {**MERGE_KEYS, "replicaSpecs": "name"}


def merged(original: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `original` with the patch applied. A value of null in the patch removes the field."""
    if patch.get(DIRECTIVE) == "replace":
        return {key: copy.deepcopy(value) for key, value in patch.items() if key != DIRECTIVE}
    found: dict[str, Any] = copy.deepcopy(dict(original))
    kept_keys = patch.get(RETAIN)
    if isinstance(kept_keys, list):
        found = {key: value for key, value in found.items() if key in kept_keys}
    for key, value in patch.items():
        if key in (DIRECTIVE, RETAIN):
            continue
        if value is None:
            found.pop(key, None)
        elif isinstance(value, Mapping):
            if value.get(DIRECTIVE) == "delete":
                found.pop(key, None)
                continue
            before = found.get(key)
            found[key] = merged(before if isinstance(before, Mapping) else {}, value)
        elif isinstance(value, list) and key in _KEYS:
            found[key] = _merged_list(found.get(key) or [], value, _KEYS[key])
        else:
            found[key] = copy.deepcopy(value)
    return found


def _merged_list(original: list[Any], patch: list[Any], key: str) -> list[Any]:
    """Return a list with the patch applied.

    An item of the patch is merged with the existing item that has the same value of `key`. An item of the patch without
    a matching item is appended.
    """
    if any(one == {DIRECTIVE: "replace"} for one in patch):
        return [merged({}, one) for one in patch if one != {DIRECTIVE: "replace"}]
    found = copy.deepcopy(original)
    for one in patch:
        place = next((index for index, old in enumerate(found) if old.get(key) == one.get(key)), None)
        if one.get(DIRECTIVE) == "delete":
            if place is not None:
                del found[place]
        elif place is None:
            found.append(merged({}, one))
        else:
            found[place] = merged(found[place], one)
    return found
