"""Which resources a part of a template speaks of, in its own stack and in others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hyperpod_ext.clusters.cdk.assembly import Template

ResourceKey = tuple[str, str]
"""A stack and a logical id in it."""

_IN_SUB = re.compile(r"\$\{([A-Za-z0-9]+)(?:\.[^}]*)?\}")


def spoken_of(value: Any, stack: str, exports: Mapping[str, ResourceKey]) -> Iterator[ResourceKey]:
    """Resources that `value`, in the template of `stack`, refers to."""
    if isinstance(value, list):
        for item in value:
            yield from spoken_of(item, stack, exports)
    if not isinstance(value, Mapping):
        return
    for name, inner in value.items():
        match name:
            case "Ref" if isinstance(inner, str):
                yield stack, inner
            case "Fn::GetAtt":
                yield stack, inner.split(".")[0] if isinstance(inner, str) else str(inner[0])
            case "Fn::Sub":
                text = inner if isinstance(inner, str) else inner[0]
                yield from ((stack, found) for found in _IN_SUB.findall(text))
                yield from spoken_of(inner if not isinstance(inner, str) else None, stack, exports)
            case "Fn::ImportValue":
                if (place := exports.get(json.dumps(inner, sort_keys=True))) is not None:
                    yield place
            case _:
                yield from spoken_of(inner, stack, exports)


def exports_of(templates: Mapping[str, Template]) -> dict[str, ResourceKey]:
    """What stacks export: the name, as JSON, and the resource that the value speaks of first."""
    found: dict[str, ResourceKey] = {}
    for stack, template in templates.items():
        for output in template.get("Outputs", {}).values():
            name = output.get("Export", {}).get("Name")
            places = list(spoken_of(output.get("Value"), stack, {}))
            if name is not None and places:
                found[json.dumps(name, sort_keys=True)] = places[0]
    return found
