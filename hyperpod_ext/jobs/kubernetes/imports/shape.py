"""Normalises a Kubernetes object before its import, so that each field has the expected type. Pure."""

from __future__ import annotations

import re
from typing import Any

from hyperpod_ext.config.files.document import Document, Path
from hyperpod_ext.errors import Problem
from hyperpod_ext.jobs.imports.how import HOW
from hyperpod_ext.jobs.imports.placeholders import names_in

_MAPPINGS = {"metadata", "spec", "template", "runPolicy", "elasticPolicy", "resources", "requests", "limits", "labels"}
_MAPPINGS |= {
    "annotations",
    "nodeSelector",
    "securityContext",
    "affinity",
    "pytorchReplicaSpecs",
    "trainer",
    "emptyDir",
}
_MAPPINGS |= {"persistentVolumeClaim", "hostPath", "configMap", "secret", "valueFrom", "secretKeyRef", "runtimeRef"}
_MAPPINGS |= {"Master", "Worker", "resourcesPerNode"}
_LISTS = {"containers", "initContainers", "env", "volumes", "volumeMounts", "tolerations", "imagePullSecrets"}
_LISTS |= {"replicaSpecs", "logMonitoringConfiguration", "ports", "envFrom"}
_WORDS = {"command", "args"}
_NUMBERS = {"replicas", "minReplicas", "maxReplicas", "spares", "numNodes", "maxRestarts", "backoffLimit"}
_FREE = {"labels", "annotations", "nodeSelector", "matchLabels"}
"""Fields that contain mappings whose keys a user chooses."""


class Shape:
    """Normalises the values of an object, such as numbers in quotes, and reports values of a wrong type.

    Args:
        document: the file of the object, for line numbers.
        placeholders: whether `$NAME` in a value is a placeholder without a value, which is reported.
    """

    def __init__(self, document: Document, *, placeholders: bool = True) -> None:
        self._document = document
        self._placeholders = placeholders
        self.problems: list[Problem] = []
        self.notes: list[Problem] = []

    def read(self, data: dict[str, Any], path: Path = ()) -> dict[str, Any]:
        """Return the object `data` without fields that have no value, and with numbers in quotes as numbers.

        Args:
            path: path of `data` in the file.
        """
        found: dict[str, Any] = {}
        for key, value in data.items():
            at = (*path, key)
            if (missing := list(dict.fromkeys(names_in(key)))) and "{" in key:
                self._missing(missing, at)
            if value is None:
                if key != "emptyDir":
                    self.notes.append(self._document.problem(at, "has no value"))
                    continue
                value = {}
            found[key] = self._value(key, value, at)
        return found

    def _value(self, key: str, value: Any, at: Path) -> Any:
        if any(part in _FREE for part in at[:-1]):
            return self._scalar(value, at)
        if key == "restartPolicy":
            return self.read(value, at) if isinstance(value, dict) else self._scalar(value, at)
        if (key in _MAPPINGS and "matchExpressions" not in at) or at[-2:-1] == ("pytorchReplicaSpecs",):
            if isinstance(value, dict):
                return self.read(value, at)
            return self._wrong(at, "must be a mapping", {})
        if key in _LISTS:
            if isinstance(value, list) and all(isinstance(item, dict) for item in value):
                return [self.read(item, (*at, index)) for index, item in enumerate(value)]
            return self._wrong(at, "must be a list of mappings", [])
        if key in _WORDS:
            if isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
                return [self._document.location((*at, n)).text or _text(item) for n, item in enumerate(value)]
            return self._wrong(at, "must be a list of words", [])
        if key in _NUMBERS:
            return self._number(value, at)
        if key == "name" and not isinstance(value, str):
            if isinstance(value, dict | list):
                return self._wrong(at, "must be a name", "")
            return _text(value)
        if key == "value" and "env" in at and not isinstance(value, dict | list):
            return self._scalar(self._document.location(at).text or _text(value), at)
        return self._scalar(value, at)

    def _scalar(self, value: Any, at: Path) -> Any:
        if isinstance(value, dict):
            return {name: self._inside(name, below, (*at, name)) for name, below in value.items()}
        if isinstance(value, list):
            return [self._scalar(below, (*at, index)) for index, below in enumerate(value)]
        if isinstance(value, str) and (missing := list(dict.fromkeys(names_in(value)))):
            self._missing(missing, at)
        text = self._document.location(at).text or ""
        if isinstance(value, int) and not isinstance(value, bool) and re.fullmatch(r"0[0-7]+", text):
            return int(text, 8)  # Kubernetes reads a file mode such as 0400 as octal
        return value

    def _inside(self, name: str, value: Any, at: Path) -> Any:
        """Normalise a field within a mapping whose own fields are not known."""
        if name in _LISTS and value is not None and not any(part in _FREE for part in at):
            return self._value(name, value, at)
        return value if name in _WORDS and isinstance(value, list) else self._scalar(value, at)

    def _number(self, value: Any, at: Path) -> int:
        if isinstance(value, str) and (missing := list(names_in(value))):
            self._missing(missing, at)
            return 1
        try:
            if isinstance(value, bool) or int(value) < 0 or int(value) != float(value):
                raise ValueError
            return int(value)
        except (ValueError, TypeError, OverflowError):
            return int(self._wrong(at, f"must be a whole number, not {str(value)[:40]!r}", 1))

    def _wrong(self, at: Path, message: str, instead: Any) -> Any:
        self.problems.append(self._document.problem(at, message))
        return instead

    def _missing(self, names: list[str], at: Path) -> None:
        if not self._placeholders:
            return
        self.problems += [
            self._document.problem(at, f"the template needs a value for {name}", HOW.format(name=name))
            for name in names
        ]


def fields_in(value: Any) -> int:
    """Return the number of fields and list items in `value`, at every depth."""
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(1 + fields_in(one) for one in below)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def mapping(value: Any) -> dict[str, Any]:
    """Return `value` if it is a mapping, otherwise an empty mapping."""
    return value if isinstance(value, dict) else {}


def mappings(value: Any) -> list[dict[str, Any]]:
    """Return the items of the list `value` that are mappings; an empty list if `value` is not a list."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
