"""The public API: names of `__all__`, names that docs, examples and templates import, and recorded names.

All must import. Adapters of libraries that are not installed are read from their source.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from observed import record
from observed.pool import ROOT

PUBLIC = ("hyperpod_ext", "hyperpod_ext.runtime", "hyperpod_ext.runtime.data")
"""Packages whose `__all__` is public."""
_PLACES = ("README.md", "docs/**/*.md", "examples/**/*.py", "examples/**/*.yaml", "templates/**/*")
_GONE = "does not import"
_IMPORTS = re.compile(
    r"from (hyperpod_ext[\w.]*) import (?:\(([^)]*)\)|(\w[\w, ]*))"
    r"|\bimport (hyperpod_ext[\w.]*\w)|-m (hyperpod_ext[\w.]*\w)"
)


def names(_fast: bool) -> Iterator[tuple[str, Any]]:
    """Each name with its kind and its parameters; None for a recorded name that is gone from scripts and code."""
    written = {*_written()}
    for name in sorted({*written, *record.recorded("names")}):
        shown = _shown(name)
        yield name, None if name not in written and str(shown).startswith(_GONE) else shown


def _written() -> Iterator[str]:
    for package in PUBLIC:
        yield from (f"{package}:{name}" for name in importlib.import_module(package).__all__)
    files = [file for place in _PLACES for file in ROOT.glob(place) if file.is_file()]
    for file in files:
        for module, many, few, whole, run in _IMPORTS.findall(file.read_text(errors="replace")):
            for name in re.findall(r"\w+", re.sub(r"#.*", "", many or few)):
                yield f"{module}:{name}"
            if whole or run:
                yield whole or run


def _shown(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        if not attribute:
            return "module" if importlib.util.find_spec(module) else _GONE
        found = getattr(importlib.import_module(module), attribute, None)
        return _described(found if found is not None else importlib.import_module(f"{module}.{attribute}"))
    except ModuleNotFoundError as error:
        ours = str(error.name).startswith("hyperpod_ext")
        return f"{_GONE}: no module {error.name}" if ours else _read_from_source(module, attribute)


def _described(found: Any) -> Any:
    if inspect.ismodule(found):
        return "module"
    if not inspect.isclass(found):
        return _parameters(found) if callable(found) else type(found).__name__
    if issubclass(found, BaseModel):
        return "model"
    ours = [one for one in found.__mro__ if one.__module__.startswith("hyperpod_ext")]
    public = sorted({name for one in ours for name in vars(one) if not name.startswith("_")})
    return {"": _parameters(found)} | {name: _parameters(getattr(found, name)) for name in public}


def _read_from_source(module: str, name: str) -> Any:
    """The description of a class or function whose module cannot be imported here."""
    source = importlib.util.find_spec(module)
    assert source is not None
    assert source.origin is not None
    for found in ast.parse(Path(source.origin).read_text()).body:
        match found:
            case ast.FunctionDef() if found.name == name:
                return _parameters_in_source(found)
            case ast.ClassDef() if found.name == name:
                return _class_in_source(found)
    return _GONE


def _class_in_source(found: ast.ClassDef) -> dict[str, str]:
    public = {"": "attribute"}
    for part in found.body:
        match part:
            case ast.FunctionDef(name="__init__"):
                part.args.args = part.args.args[1:]
                public[""] = _parameters_in_source(part)
            case ast.FunctionDef() if not part.name.startswith("_"):
                is_property = any("property" in ast.unparse(one) for one in part.decorator_list)
                public[part.name] = "attribute" if is_property else _parameters_in_source(part)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                if not name.startswith("_"):
                    public[name] = "attribute"
    return public


def _parameters_in_source(found: ast.FunctionDef) -> str:
    parameters = found.args
    for one in [*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs, parameters.vararg, parameters.kwarg]:
        if one is not None:
            one.annotation = None
    parameters.defaults = [ast.Constant(...) for _ in parameters.defaults]
    parameters.kw_defaults = [None if one is None else ast.Constant(...) for one in parameters.kw_defaults]
    return f"({ast.unparse(parameters)})"


def _parameters(found: Any) -> str:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return "attribute"
    plain = [
        one.replace(annotation=one.empty, default=one.empty if one.default is one.empty else ...)
        for one in signature.parameters.values()
    ]
    return str(inspect.Signature(plain)).replace("=Ellipsis", "=...")
