"""Reads the docstrings under the fields of models from the source code, on demand.

pydantic can read these docstrings when it creates a class. Reading all docstrings would take half of the time of
`hp-ext validate`, which needs no docstrings for a valid spec.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, get_type_hints

from pydantic import BaseModel


def fields_of(model: type) -> dict[str, Any]:
    """Return the types of the fields of a model or a dataclass."""
    if issubclass(model, BaseModel):
        return {name: info.annotation for name, info in model.model_fields.items()}
    return get_type_hints(model)


def description(model: type, field: str) -> str:
    """Return the documentation of a field of `model`: the description in the field's type if it has one, otherwise the
    docstring under the field. Empty if the field has no documentation."""
    if issubclass(model, BaseModel) and (own := model.model_fields[field].description):
        return own
    for base in model.__mro__:
        if found := _documented(base.__module__).get(base.__qualname__, {}).get(field):
            return found
    return ""


@cache
def _documented(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of fields in a module, by class name and field name."""
    if not module.startswith("hyperpod_ext."):
        return {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: dict(_docstrings(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _docstrings(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for before, after in zip(node.body, node.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and (text := _text_of(after)):
            yield before.target.id, inspect.cleandoc(text)


def _text_of(statement: ast.stmt) -> str:
    value: Any = statement.value if isinstance(statement, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
