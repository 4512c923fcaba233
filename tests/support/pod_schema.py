"""What a pod may say, from the published models of Kubernetes: makes `pod_schema.json` and `pod_texts.json`.

python tests/support/pod_schema.py
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from kubeflow_trainer_api import models
from pydantic import BaseModel

FILE = Path(__file__).parents[2] / "hyperpod_ext/catalog/pod_schema.json"
TEXTS = FILE.with_name("pod_texts.json")
ROOTS = {
    "PodSpec": models.IoK8sApiCoreV1PodSpec,
    "PodSpecPatch": models.TrainerV1alpha1PodSpecPatch,
}
_PREFIXES = ("IoK8sApiCoreV1", "IoK8sApimachineryPkgApisMetaV1", "IoK8sApimachineryPkgApi", "TrainerV1alpha1")
_UNIONS = {"IoK8sApimachineryPkgApiResourceQuantity": "quantity"}
_UNIONS["IoK8sApimachineryPkgUtilIntstrIntOrString"] = "port-or-name"  # in pods, only ports are of this type
_CHOICE = re.compile(r'- `"([^"`]*)"`')
_SHORT = len("Deprecated.")
"""Sentences that say nothing alone."""
Model = type[BaseModel]


def pod_schema() -> dict[str, Any]:
    """Types by name, each with its fields; `[]T` is a list of T, `{}T` a mapping to T. Fields that must be there, and
    the values of those that are a choice.

    Fields keep the order of the file, which is the one in which they are rendered; new ones come last.
    """
    known = _known(FILE)
    found = {name: _ordered(_fields(one), known.get("types", {}).get(name, {})) for name, one in _all_models().items()}
    needed = {name: [field for field, info in _infos(one) if info.is_required()] for name, one in _all_models().items()}
    required = {name: sorted(fields) for name, fields in needed.items() if fields}
    choices = {
        f"{name}.{field}": listed
        for name, one in _all_models().items()
        for field, info in sorted(_infos(one))
        if (listed := _CHOICE.findall((info.description or "").partition("Possible enum values:")[2]))
    }
    return _dated(known, {"types": found, "required": required, "choices": choices})


def pod_texts() -> dict[str, Any]:
    """The first sentence of Kubernetes' documentation of each field."""
    found = {
        name: {field: _sentence(info.description or "") for field, info in sorted(_infos(one))}
        for name, one in _all_models().items()
    }
    return _dated(_known(TEXTS), {"texts": found})


def text(content: Any) -> str:
    """A file of it."""
    return json.dumps(content, indent=1) + "\n"


def _known(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())) if file.exists() else {}


def _dated(known: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """The facts with their source, and the day on which they became so."""
    wanted = {"source": f"kubeflow_trainer_api {importlib.metadata.version('kubeflow_trainer_api')}, of PyPI", **facts}
    same = all(known.get(part) == value for part, value in wanted.items())
    return {"dated": known["dated"] if same else f"{date.today():%Y-%m-%d}", **wanted}


def _all_models() -> dict[str, Model]:
    found: dict[str, Model] = {}
    waiting: list[Model] = list(ROOTS.values())
    while waiting:
        model = waiting.pop()
        if _name(model) not in found:
            found[_name(model)] = model
            waiting += [one for _field, info in _infos(model) for one in _models(info.annotation)]
    return dict(sorted(found.items()))


def _infos(model: Model) -> Iterator[tuple[str, Any]]:
    for name, info in model.model_fields.items():
        yield info.alias or name, info


def _fields(model: Model) -> dict[str, str]:
    return {field: _word(info.annotation) for field, info in _infos(model)}


def _ordered(fields: dict[str, str], known: dict[str, str]) -> dict[str, str]:
    names = [*(name for name in known if name in fields), *sorted(fields.keys() - known.keys())]
    return {name: fields[name] for name in names}


def _sentence(description: str) -> str:
    plain = re.sub(r"\s*\((e\.g|i\.e)\.[^()]*(\([^()]*\)[^()]*)*\)", "", " ".join(description.split()))
    first, *rest = re.split(r"(?<=[^.\s])(?<!e\.g)(?<!i\.e)\.(?:\s|$)", plain)
    return first if len(first) > _SHORT else ". ".join([first, *rest[:1]])


def _name(model: Model) -> str:
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
        union = fields & {"one_of_schemas", "actual_instance"} or not fields
        return _UNIONS.get(kind.__name__, "any") if union else _name(kind)
    plain = {str: "string", bool: "boolean", int: "integer", float: "number"}
    return plain.get(kind, "any")


def _models(kind: Any) -> Iterator[Model]:
    if inspect.isclass(kind) and issubclass(kind, BaseModel):
        if _word(kind) == _name(kind):
            yield kind
        return
    for one in typing.get_args(kind):
        yield from _models(one)


if __name__ == "__main__":
    FILE.write_text(text(pod_schema()), encoding="utf-8")
    TEXTS.write_text(text(pod_texts()), encoding="utf-8")
