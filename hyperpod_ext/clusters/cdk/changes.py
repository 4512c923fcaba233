"""Computes the changes that new templates make to existing stacks, and which resources are replaced. Pure.

CloudFormation replaces a resource if one of its create-only properties changes. A create-only property also changes if
it refers to a replaced resource. `find_changes` follows references across stacks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from hyperpod_ext.catalog.create_only import create_only
from hyperpod_ext.clusters.cdk.assembly import Template, resources_of
from hyperpod_ext.clusters.changes import OF_A_NEW_GROUP

Effect = Literal["create", "update", "may replace", "replace", "delete", "keep"]
FieldEffect = Literal["update", "may replace", "replace", "replace group", "delete group"]

ResourceKey = tuple[str, str]
"""The name of a stack, and the logical id of a resource in the stack."""

CLUSTER = "AWS::SageMaker::Cluster"
_NAMES = ("InstanceGroupName", "Key", "Name", "Id", "Sid", "PolicyName")
"""Names of properties that identify the items of a list, so that lists can be compared regardless of order."""
_IN_SUB = re.compile(r"\$\{([A-Za-z0-9]+)(?:\.[^}]*)?\}")
_STUCK = frozenset({"replace", "may replace", "replace group", "delete group"})


@dataclass(frozen=True, slots=True)
class FieldChange:
    """Change of one property of a resource."""

    path: str
    """Path of the property, such as `VpcConfig.SecurityGroupIds` or `InstanceGroups.workers.InstanceCount`."""
    before: Any
    after: Any
    effect: FieldEffect


@dataclass(frozen=True, slots=True)
class ResourceChange:
    """Change of one resource of a stack."""

    stack: str
    id: str
    """Logical id of the resource in the template."""
    kind: str
    """CloudFormation type of the resource."""
    effect: Effect
    fields: tuple[FieldChange, ...] = ()

    @property
    def breaks(self) -> bool:
        """Whether the change would replace or delete an existing resource or machines of a cluster."""
        return self.effect in ("replace", "may replace", "delete") or any(one.effect in _STUCK for one in self.fields)

    def to_json(self) -> dict[str, Any]:
        """Return the change as JSON."""
        return asdict(self) | {"breaks": self.breaks}


def find_changes(there: Mapping[str, Template], wanted: Mapping[str, Template]) -> list[ResourceChange]:
    """Return all changes that a deployment would make.

    An existing stack without a new template counts as renamed if `wanted` contains a new stack with the same part after
    the last dash. An existing stack that has neither a new template nor a new name is ignored, as in CDK.

    Args:
        there: templates of existing stacks, by stack name.
        wanted: new templates, by stack name.
    """
    before_of = _pair(there, wanted)
    found = {}
    for stack, template in wanted.items():
        old = before_of.get(stack)
        for change in _of_stack(stack, resources_of(there[old]) if old else {}, resources_of(template)):
            found[change.stack, change.id] = change
    return list(_followed(found, wanted).values())


def _pair(there: Mapping[str, Template], wanted: Mapping[str, Template]) -> dict[str, str]:
    """Return, for each stack in `wanted`, the name of the existing stack in `there` that the new template updates. New
    stacks are left out."""
    pairs = {name: name for name in wanted if name in there}
    lost = {name.rpartition("-")[2]: name for name in there if name not in wanted}
    for name in wanted:
        if name not in pairs and (old := lost.get(name.rpartition("-")[2])):
            pairs[name] = old
    return pairs


def _of_stack(stack: str, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[ResourceChange]:
    for name, resource in wanted.items():
        kind = resource["Type"]
        if name not in there:
            yield ResourceChange(stack, name, kind, "create")
        elif there[name]["Type"] != kind:
            yield ResourceChange(
                stack, name, kind, "replace", (FieldChange("Type", there[name]["Type"], kind, "replace"),)
            )
        elif fields := _fields(kind, there[name].get("Properties", {}), resource.get("Properties", {})):
            yield ResourceChange(stack, name, kind, _worst(fields), fields)
    for name, resource in there.items():
        if name not in wanted:
            kept = resource.get("DeletionPolicy") in ("Retain", "RetainExceptOnCreate", "Snapshot")
            yield ResourceChange(stack, name, resource["Type"], "keep" if kept else "delete")


def _worst(fields: tuple[FieldChange, ...]) -> Effect:
    effects = {field.effect for field in fields}
    return "replace" if "replace" in effects else "may replace" if "may replace" in effects else "update"


def _fields(kind: str, before: Any, after: Any) -> tuple[FieldChange, ...]:
    fixed = create_only(kind)
    found = []
    for path, old, new in _leaves((), before, after):
        effect: FieldEffect = "update"
        if fixed is None:
            effect = "may replace"  # if the resource type is unknown, any property may be create-only
        elif any(_touches(path, one, before, after) for one in fixed.always):
            effect = "replace"
        elif any(_touches(path, one, before, after) for one in fixed.sometimes):
            effect = "may replace"
        elif kind == CLUSTER:
            effect = _of_group(path, old, new)
        found.append(FieldChange(".".join(path), old, new, effect))
    return tuple(found)


def _of_group(path: tuple[str, ...], before: Any, after: Any) -> FieldEffect:
    if path[0] not in ("InstanceGroups", "RestrictedInstanceGroups") or before is None:
        return "update"
    if len(path) == 2:
        return "delete group" if after is None else "update"
    return "replace group" if len(path) > 2 and path[2] in OF_A_NEW_GROUP else "update"


def _leaves(path: tuple[str, ...], before: Any, after: Any) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield path, old value and new value of each difference. Mappings and lists with named items are compared item by
    item; all other values are compared as a whole."""
    if before == after:
        return
    if _is_plain(before) and _is_plain(after):
        for name in dict.fromkeys((*before, *after)):
            yield from _leaves((*path, name), before.get(name), after.get(name))
        return
    old, new = _by_name(before), _by_name(after)
    if old is not None and new is not None and (old or new):
        if old == new:
            return  # no change if only the order of the items differs
        for name in dict.fromkeys((*old, *new)):
            yield from _leaves((*path, name), old.get(name), new.get(name))
        return
    yield path, before, after


def _is_plain(value: Any) -> bool:
    """Return whether `value` is a mapping, but no intrinsic function of CloudFormation such as `Ref`."""
    return isinstance(value, Mapping) and not any(name == "Ref" or name.startswith("Fn::") for name in value)


def _by_name(value: Any) -> dict[str, Any] | None:
    """Return the items of a list by their unique names; None if the items have no unique names."""
    if not isinstance(value, list) or not all(_is_plain(item) for item in value):
        return None
    for member in _NAMES:
        names = [item.get(member) for item in value]
        if all(isinstance(name, str) for name in names) and len(set(names)) == len(names):
            return dict(zip(names, value, strict=True))
    return None


def _touches(path: tuple[str, ...], fixed: str, before: Any, after: Any) -> bool:
    """Return whether the difference at `path` changes the create-only property with the dotted path `fixed`."""
    parts = tuple(fixed.split("."))
    if len(path) >= len(parts):
        return all(part in ("*", step) for part, step in zip(parts, path, strict=False))
    if not all(part in ("*", step) for part, step in zip(parts, path, strict=False)):
        return False
    # the difference is at a parent of `fixed`, so compare the values at `fixed` itself
    return bool(_at(before, parts) != _at(after, parts))


def _at(value: Any, parts: tuple[str, ...]) -> Any:
    for index, part in enumerate(parts):
        if isinstance(value, list):
            rest = parts[index + 1 :] if part == "*" else parts[index:]
            return [_at(item, rest) for item in value]
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def _followed(
    found: dict[ResourceKey, ResourceChange], wanted: Mapping[str, Template]
) -> dict[ResourceKey, ResourceChange]:
    """Return the changes in `found`, and the changes of resources that must be replaced, too, because they refer to a
    replaced resource."""
    exports = _exports(wanted)
    gone = [place for place, change in found.items() if change.effect == "replace"]
    while gone:
        replaced = gone.pop()
        for stack, template in wanted.items():
            for name, resource in resources_of(template).items():
                change = found.get((stack, name))
                if change is not None and change.effect in ("create", "replace"):
                    continue
                fields = tuple(_because_of(replaced, stack, resource, exports))
                if fields:
                    base = change or ResourceChange(stack, name, resource["Type"], "replace")
                    found[stack, name] = replace(base, effect="replace", fields=(*base.fields, *fields))
                    gone.append((stack, name))
    return found


def _because_of(
    replaced: ResourceKey, stack: str, resource: Mapping[str, Any], exports: Mapping[str, ResourceKey]
) -> Iterator[FieldChange]:
    fixed = create_only(resource["Type"])
    for path in fixed.always if fixed else ():
        value = _at(resource.get("Properties", {}), tuple(path.split(".")))
        if replaced in _referred_to(value, stack, exports):
            yield FieldChange(path, value, f"what replaces {replaced[0]}.{replaced[1]}", "replace")


def _referred_to(value: Any, stack: str, exports: Mapping[str, ResourceKey]) -> Iterator[ResourceKey]:
    """Yield the resources that `value` refers to. `stack` is the stack with the template that contains `value`."""
    if isinstance(value, list):
        for item in value:
            yield from _referred_to(item, stack, exports)
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
                yield from _referred_to(inner if not isinstance(inner, str) else None, stack, exports)
            case "Fn::ImportValue":
                if (place := exports.get(json.dumps(inner, sort_keys=True))) is not None:
                    yield place
            case _:
                yield from _referred_to(inner, stack, exports)


def _exports(templates: Mapping[str, Template]) -> dict[str, ResourceKey]:
    """Return, for each exported output of the stacks, the first resource that the output's value refers to. The keys
    are the names of the exports as JSON."""
    found: dict[str, ResourceKey] = {}
    for stack, template in templates.items():
        for output in template.get("Outputs", {}).values():
            name = output.get("Export", {}).get("Name")
            places = list(_referred_to(output.get("Value"), stack, {}))
            if name is not None and places:
                found[json.dumps(name, sort_keys=True)] = places[0]
    return found
