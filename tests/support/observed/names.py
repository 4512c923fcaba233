"""Names that scripts import: those in docs, examples and templates, and those that were recorded. All must import."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from observed import record
from observed.pool import ROOT

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
        return f"{_GONE}: no module {error.name}"


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
