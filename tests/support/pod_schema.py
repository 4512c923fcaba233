"""What a pod may say, from the published models of Kubernetes: makes `catalog/pod_schema.json`.

python tests/support/pod_schema.py
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import types
import typing
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from kubeflow_trainer_api import models
from pydantic import BaseModel

FILE = Path(__file__).parents[2] / "hyperpod_ext/catalog/pod_schema.json"
ROOTS = {
    "PodSpec": models.IoK8sApiCoreV1PodSpec,
    "PodSpecPatch": models.TrainerV1alpha1PodSpecPatch,
}
_WORDS = {"StrictStr": "string", "StrictBool": "boolean", "StrictInt": "integer", "StrictFloat": "number"}
_PREFIXES = ("IoK8sApiCoreV1", "IoK8sApimachineryPkgApisMetaV1", "IoK8sApimachineryPkgApi", "TrainerV1alpha1")


def pod_schema() -> dict[str, Any]:
    """Types by name, each with its fields; `[]T` is a list of T, `{}T` a mapping to T."""
    found: dict[str, dict[str, str]] = {}
    waiting: list[type[BaseModel]] = list(ROOTS.values())
    while waiting:
        model = waiting.pop()
        if _name(model) in found:
            continue
        fields = {info.alias or name: info.annotation for name, info in model.model_fields.items()}
        found[_name(model)] = {name: _word(kind) for name, kind in sorted(fields.items())}
        waiting += [one for kind in fields.values() for one in _models(kind)]
    version = importlib.metadata.version("kubeflow_trainer_api")
    wanted = {"source": f"kubeflow_trainer_api {version}, of PyPI", "types": dict(sorted(found.items()))}
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    same = {"source": known.get("source"), "types": known.get("types")} == wanted
    return {"dated": known["dated"] if same else f"{date.today():%Y-%m-%d}", **wanted}


def text() -> str:
    """The file."""
    return json.dumps(pod_schema(), indent=1) + "\n"


def _name(model: type[BaseModel]) -> str:
    name = model.__name__
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _word(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _word(next(one for one in args if one is not type(None)))
    if origin is typing.Annotated:
        base = args[0]
        return {str: "string", bool: "boolean", int: "integer", float: "number"}.get(base) or _word(base)
    if origin is list:
        return f"[]{_word(args[0])}"
    if origin is dict:
        return "{}" + _word(args[1])
    if inspect.isclass(kind) and issubclass(kind, BaseModel):
        fields = set(kind.model_fields)
        return "any" if fields & {"one_of_schemas", "actual_instance"} or not fields else _name(kind)
    plain = {str: "string", bool: "boolean", int: "integer", float: "number"}
    return plain.get(kind, "any")


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(kind) and issubclass(kind, BaseModel):
        if _word(kind) != "any":
            yield kind
        return
    for one in typing.get_args(kind):
        yield from _models(one)


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
