"""What of a file is in the file that its spec renders to, and what is not: each difference by name. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hyperpod_ext.config.files.document import Document, Path
from hyperpod_ext.errors import Problem
from hyperpod_ext.submit.kubernetes.imports.shape import leaves

_NAMED = {"env", "imagePullSecrets", "initContainers", "logMonitoringConfiguration"}
_SKIPPED = {("apiVersion",), ("kind",), ("metadata", "name")}
_OWN = ("hyperpod-ext/", "app.kubernetes.io/managed-by")
_ROLES = {"pytorchReplicaSpecs", "replicaSpecs"}
Key = tuple[str, ...]


def differences(original: dict[str, Any], rendered: dict[str, Any], document: Document) -> list[Problem]:
    """What `rendered` lacks, says otherwise, or adds. Commands are not compared: what reads them names their losses."""
    there, here = _facts(original), _facts(rendered)
    found: list[Problem] = []
    seen: set[Key] = set()
    for key, (path, value) in there.items():
        if key in here and _same(here[key][1], value):
            continue
        shown = _unit(key)
        if shown in seen:
            continue
        seen.add(shown)
        ours = [one for other, one in here.items() if other[: len(shown)] == shown]
        at = path[: _depth(path, key, shown)]
        if not ours:
            found.append(document.problem(at, "is not carried: a spec has no field that says it"))
        elif key in here:
            message = f"is changed: {_short(value)} here, {_short(here[key][1])} in what the spec renders to"
            found.append(document.problem(path, message))
        else:
            found.append(document.problem(path, f"is not carried: {_short(value)}"))
    added = dict.fromkeys(_unit(key) for key in here if key not in there and not _is_own(key))
    for shown in added:
        if shown in seen or any(other[: len(shown)] == shown for other in there):
            continue
        seen.add(shown)
        values = [value for key, (_path, value) in here.items() if key[: len(shown)] == shown]
        what = f" with {_short(values[0])}" if len(values) == 1 else ""
        found.append(document.problem((), f"{' '.join(shown)} is added{what}: what the spec renders to has it"))
    return found


def _facts(job: dict[str, Any]) -> dict[Key, tuple[Path, Any]]:
    found: dict[Key, tuple[Path, Any]] = {}
    for key, path, value in _walk(job, (), ()):
        if key not in _SKIPPED and value not in ({}, []):
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
                    complete = {"operator": "Equal" if one.get("value") else "Exists"} | one
                    yield ("toleration", json.dumps(complete, sort_keys=True)), (*at, index), True
            elif name == "ports" and isinstance(below, list):
                for index, one in enumerate(below):
                    yield ("port", str(one.get("containerPort"))), (*at, index), True
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
    for container in pod["containers"][:1]:
        for mount in container.get("volumeMounts") or []:
            found.setdefault(str(mount.get("name")), []).append(str(mount.get("mountPath")))
    return found


def _unit(key: Key) -> Key:
    """What is named as one: a variable, a volume, a section of the pod."""
    if key[0] == "container" and len(key) > 1 and key[1] in ("env", "resources"):
        return key[:4] if key[1] == "resources" else key[:3]
    if key[0] in ("volume", "toleration", "port", "replica") or key[0] == "container":
        return key[:2]
    if key[:2] == ("pod", "spec"):
        return key[: 4 if key[2] in ("affinity", "nodeSelector") else 3]
    return key[:3]


def _depth(path: Path, key: Key, shown: Key) -> int:
    return max(len(path) - (len(key) - len(shown)), 1)


def _is_own(key: Key) -> bool:
    return any(part.startswith(_OWN) for part in key) or key[:2] == ("metadata", "annotations")


def _same(ours: Any, theirs: Any) -> bool:
    def plain(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    return plain(ours) == plain(theirs) or _amount(ours) == _amount(theirs) is not None


def _amount(value: Any) -> float | None:
    """A quantity of Kubernetes in its unit: `32Gi` is 32768Mi."""
    text = str(value)
    units = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "m": 1e-3}
    for unit, size in units.items():
        if text.endswith(unit):
            text, factor = text.removesuffix(unit), float(size)
            break
    else:
        factor = 1.0
    try:
        return float(text) * factor
    except ValueError:
        return None


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


__all__ = ["differences", "leaves"]
