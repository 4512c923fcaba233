"""Compares an imported object with the object rendered from its spec, and reports each difference. Pure.

A *key* names a value independently of the value's position: names identify the items of lists, and the pods of all
groups have the same keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.files.document import Document, Path
from hyperpod_ext.errors import Problem
from hyperpod_ext.jobs.kubernetes.imports.command import expanded
from hyperpod_ext.jobs.kubernetes.sizes import size_of

_NAMED = {"env", "imagePullSecrets", "initContainers", "logMonitoringConfiguration"}
_SKIPPED = {("apiVersion",), ("kind",), ("metadata", "name")}
_COMMANDS = (("spec", "trainer", "command"), ("spec", "trainer", "args"))
_OWN_VOLUMES = (labels.ADDRESSES_DIR, labels.SECRET_DIR)
_OWN = ("hyperpod-ext/", "app.kubernetes.io/managed-by")
_ROLES = {"pytorchReplicaSpecs", "replicaSpecs"}
Key = tuple[str, ...]


def differences(original: dict[str, Any], rendered: dict[str, Any], document: Document) -> list[Problem]:
    """Return a problem for each field of `original` that is missing or different in `rendered`.

    Commands are not compared, because the module that imports commands reports the lost parts of commands.

    Args:
        original: the imported object.
        rendered: the object rendered from its spec.
        document: the imported file, for line numbers.
    """
    there, here = _facts(original), _facts(rendered)
    known = {key[2]: str(value) for key, (_path, value) in there.items() if key[:2] == ("container", "env")}
    found: list[Problem] = []
    seen: set[Key] = set()
    for key, (path, value) in there.items():
        if key in here and _same(here[key][1], value):
            continue
        if key in here and str(here[key][1]).replace("$$", "$") == _filled(str(value), known):
            continue
        shown = _unit(key)
        if shown in seen:
            continue
        ours = [one for other, one in here.items() if other[: len(shown)] == shown]
        at = path[: _depth(path, key, shown)]
        if not ours:
            seen.add(shown)  # do not report a missing variable or volume again
            what = f"variable {shown[-1]} " if "env" in shown[:-1] else ""
            found.append(
                document.problem(at, f"{what}is not carried: a spec has no such field{_summary(there, shown)}")
            )
        elif key in here:
            message = f"is changed: {_short(value)} in this file, {_short(here[key][1])} in the rendered spec"
            found.append(document.problem(path, message))
        else:
            found.append(document.problem(path, f"is not carried: {_short(value)}"))
    between = list(_between_groups(original, document))
    places = {one.path for one in between}
    return [*(one for one in found if not any(at.startswith(f"{one.path}.") for at in places)), *between]


def renamed(original: dict[str, Any], rendered: dict[str, Any], document: Document) -> Iterator[Problem]:
    """Yield a problem for each group and container that has another name in the rendered object."""
    ours = [group for _name, _path, group in groups_of(rendered)]
    for at, (_name, path, group) in enumerate(groups_of(original)):
        mine = ours[min(at, len(ours) - 1)] if ours else {}
        inside: Path = ("template", "spec", "containers", 0)
        for place, there, here in (((), group, mine), (inside, _first(group), _first(mine))):
            if there.get("name") != here.get("name"):
                what = f"is {here.get('name')} in the rendered spec, {there.get('name')} in this file"
                yield document.problem((*path, *place, "name"), what)


def _first(group: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(iter(((group.get("template") or {}).get("spec") or {}).get("containers") or []), {})


def additions(original: dict[str, Any], rendered: dict[str, Any], document: Document) -> list[Problem]:
    """Return a problem for each field that only the rendered object has."""
    there, here = _facts(original), _facts(rendered)
    found = []
    for shown in dict.fromkeys(_unit(key) for key in here if key not in there and not _is_own(key)):
        if any(other[: len(shown)] == shown for other in there):
            continue
        values = [value for key, (_path, value) in here.items() if key[: len(shown)] == shown]
        what = f" with {_short(values[0])}" if len(values) == 1 else ""
        found.append(document.problem((), f"{' '.join(shown)} is added{what}: only the rendered spec has it"))
    return found


def _filled(text: str, known: dict[str, str]) -> str:
    """Replace `$(NAME)` in `text` with values of the container's variables, which may contain references themselves."""
    for _level in range(8):
        text, before = expanded(text, known), text
        if text == before:
            break
    return text


def _between_groups(job: dict[str, Any], document: Document) -> Iterator[Problem]:
    """Yield a problem for each difference between the pods of the groups of one job.

    A spec has only one kind of pod, so all pods of the rendered job are like the pods of the first group.
    """
    groups = [group for group in groups_of(job) if group[2].get("replicas", 1)]
    if len(groups) < 2:
        return
    first, path, group = groups[0]
    one = _of_group(group, path)
    for name, at, other in groups[1:]:
        another = _of_group(other, at)
        for shown in dict.fromkeys(_unit(key) for key in [*another, *one]):
            there, here = (_part(facts, shown) for facts in (one, another))
            if {key: str(value) for key, (_at, value) in there.items()} == {k: str(v) for k, (_at, v) in here.items()}:
                continue
            where = next(iter(here.values()), (at, None))[0]
            what = f"{' '.join(shown)} differs from {first}{_summary(here, shown)}"
            if not there:
                what = f"{' '.join(shown)} is not in {first}{_summary(here, shown)}"
            elif not here:
                what = f"has no {' '.join(shown)}, as {first} has"
            yield document.problem(where, f"{what}: a spec has one kind of pod, so {name} gets the pods of {first}")


def groups_of(job: Mapping[str, Any]) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Yield name, path and content of each group of pods in the object of a HyperPodPyTorchJob or PyTorchJob."""
    spec = job.get("spec") or {}
    for section in sorted(_ROLES):
        found = spec.get(section) or {}
        for place, group in found.items() if isinstance(found, dict) else enumerate(found):
            if isinstance(group, dict):
                yield str(group.get("name", place)), ("spec", section, place), group


def _of_group(group: dict[str, Any], path: Path) -> dict[Key, tuple[Path, Any]]:
    """Return path and value of each field of a group's pod, including its command, by the field's key.

    Fields that a spec can set for each group are left out.
    """
    found: dict[Key, tuple[Path, Any]] = {}
    template = group.get("template") or {}
    for key, at, value in _walk(template, ("pod",), (*path, "template")):
        if value not in ({}, []) and not (path[1] == "replicaSpecs" and _is_of_group(key)):
            found.setdefault(key, (at, value))
    if path[1] == "pytorchReplicaSpecs":
        parts = {name: value for name, value in group.items() if name not in ("template", "replicas")}
        found |= {("replica", key[0], *key[1:]): (at, value) for key, at, value in _walk(parts, (), path) if key}
    for index, container in enumerate(((template.get("spec") or {}).get("containers") or [])[:1]):
        words = [*(container.get("command") or []), *(container.get("args") or [])]
        found["container", "command"] = (*path, "template", "spec", "containers", index), words
    return found


def _is_of_group(key: Key) -> bool:
    return key[:3] == ("pod", "spec", "priorityClassName") or key[:4] == (
        "pod",
        "spec",
        "nodeSelector",
        labels.INSTANCE_TYPE,
    )


def _summary(facts: dict[Key, tuple[Path, Any]], shown: Key) -> str:
    """Return a short text with the values whose keys begin with `shown`; empty if there are none."""
    found = {
        ".".join(key[len(shown) :]): value for key, (_at, value) in _part(facts, shown).items() if value is not True
    }
    return f" ({_short(found.popitem()[1] if [*found] == [''] else found)})" if found else ""


def _part(facts: dict[Key, tuple[Path, Any]], shown: Key) -> dict[Key, tuple[Path, Any]]:
    return {key: value for key, value in facts.items() if key[: len(shown)] == shown}


def _facts(job: dict[str, Any]) -> dict[Key, tuple[Path, Any]]:
    found: dict[Key, tuple[Path, Any]] = {}
    for key, path, value in _walk(job, (), ()):
        if key not in _SKIPPED and key[:3] not in _COMMANDS and value not in ({}, []):
            found.setdefault(key, (path, value))
    return found


def _walk(value: Any, key: Key, path: Path) -> Iterator[tuple[Key, Path, Any]]:
    if isinstance(value, dict):
        mounted = _mounts(value) if "containers" in value else {}
        for name, below in value.items():
            at = (*path, name)
            if name == "containers" and isinstance(below, list):
                for index, one in enumerate(below):
                    part = ("container",) if index == 0 else ("container", str(one.get("name")))
                    rest = {k: v for k, v in one.items() if k not in ("name", "command", "args") or index}
                    yield from _walk(rest, part, (*at, index))
            elif name == "volumes" and isinstance(below, list):
                for index, one in enumerate(below):
                    source = {k: v for k, v in one.items() if k != "name"}
                    for mount in mounted.get(str(one.get("name")), [f"{one.get('name')}, which nothing mounts"]):
                        yield from _walk(source, ("volume", mount), (*at, index))
            elif name == "volumeMounts" and isinstance(below, list):
                for index, one in enumerate(below):
                    options = {k: v for k, v in one.items() if k not in ("name", "mountPath")}
                    yield ("volume", str(one.get("mountPath")), "mounted"), (*at, index), True
                    yield from _walk(options, ("volume", str(one.get("mountPath"))), (*at, index))
            elif name in _ROLES:
                roles = below.items() if isinstance(below, dict) else enumerate(below)
                for role, one in roles:
                    for part, inner in one.items():
                        if part == "template":
                            yield from _walk(inner, ("pod",), (*at, role, part))
                        elif part not in ("replicas", "name"):
                            yield from _walk(inner, ("replica", part), (*at, role, part))
            elif name == "tolerations" and isinstance(below, list):
                for index, one in enumerate(below):
                    complete = {"operator": "Equal"} | one
                    yield ("toleration", json.dumps(complete, sort_keys=True)), (*at, index), True
            elif name == "ports" and isinstance(below, list):
                for index, one in enumerate(below):
                    port = ("port", str(one.get("containerPort")))
                    yield port, (*at, index), True
                    yield from _walk({k: v for k, v in one.items() if k != "containerPort"}, port, (*at, index))
            elif name in _NAMED and isinstance(below, list):
                for index, one in enumerate(below):
                    inner = {k: v for k, v in one.items() if k != "name"} or {"value": ""}
                    yield from _walk(inner, (*key, name, str(one.get("name"))), (*at, index))
            else:
                yield from _walk(below, (*key, str(name)), at)
    elif isinstance(value, list) and value:
        for index, below in enumerate(value):
            yield from _walk(below, (*key, str(index)), (*path, index))
    else:
        yield key, path, value


def _mounts(pod: dict[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for container in (pod["containers"] or [])[:1]:
        for mount in container.get("volumeMounts") or []:
            found.setdefault(str(mount.get("name")), []).append(str(mount.get("mountPath")))
    return found


def _unit(key: Key) -> Key:
    """Return the key of the unit to which a value belongs: a variable, a volume, or a section of the pod.

    A missing unit is reported once, not once for each of its values.
    """
    if key[0] == "container" and len(key) > 1 and key[1] in ("env", "resources"):
        return key[:4] if key[1] == "resources" else key[:3]
    if key[0] in ("volume", "toleration", "port", "replica") or key[0] == "container":
        return key[:2]
    if key[:2] == ("spec", "trainer"):
        return key[: {"env": 4, "resourcesPerNode": 5}.get(key[2], 3)]
    if key[:2] == ("pod", "spec"):
        return key[: 4 if key[2] in ("affinity", "nodeSelector") else 3]
    return key[: 4 if key[2:3] in (("labels",), ("annotations",)) or key[1:2] in (("labels",), ("annotations",)) else 3]


def _depth(path: Path, key: Key, shown: Key) -> int:
    return max(len(path) - (len(key) - len(shown)), 1)


def _is_own(key: Key) -> bool:
    if key[0] == "volume":
        return key[1] in _OWN_VOLUMES
    return any(part.startswith(_OWN) for part in key) or key[:2] == ("metadata", "annotations")


def _same(ours: Any, theirs: Any) -> bool:
    def plain(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    return plain(ours) == plain(theirs) or _amount(ours) == _amount(theirs) is not None


def _amount(value: Any) -> float | None:
    """Return the number that a Kubernetes quantity such as `4Gi` stands for; None if `value` is not a quantity."""
    try:
        return size_of(str(value))
    except ValueError:
        return None


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}... ({len(text)} characters)"
