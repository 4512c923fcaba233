"""Find the file and line where a script first sets a variable, for warnings and errors."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from hyperpod_ext.runtime.state.unsaved.reachable import is_of_script, script_frames

_SETS = (
    r"(?:(?:class|def)\s+{0}\b|(?:[\w*, ()]*,\s*)?[(*]*{0}\b(?:\s*,[\w*, ()]*)?\s*(?::[^=]+)?=(?!=)"
    r"|for\b.*\b{0}\b.*\bin\b|with\b.*\bas\s+{0}\b)"
)


def first_set(owners: Mapping[str, Any], frame: FrameType | None) -> str:
    """Return a sentence with the file and line where each variable is first set; empty if no line is found.

    Args:
        owners: the object that contains each variable, by the variable's name, such as `utils.STATE['mean']`.
        frame: the frame of the function with the training loop.
    """
    frames = list(script_frames(frame))
    places = {name: _place(re.findall(r"\w+", name), owner, frames) for name, owner in owners.items()}
    found = [f"{name} at {place}" for name, place in places.items() if place]
    return f" First set: {', '.join(found)}." if found else ""


def _place(path: Sequence[str], owner: Any, frames: Sequence[FrameType]) -> str:
    if isinstance(owner, type) and owner.__module__ in sys.modules:
        return _in_module(path, vars(sys.modules[owner.__module__]))
    codes = [each.f_code for each in frames if path[0] in each.f_code.co_varnames + each.f_code.co_cellvars]
    if place := next((_line(each.co_filename, path[0], r"\s+", each.co_firstlineno) for each in codes), ""):
        return place
    spaces = [each.f_globals for each in frames]
    spaces += [vars(module) for name, module in list(sys.modules.items()) if is_of_script(name)]
    return next((place for space in spaces if (place := _in_module(path, space))), "")


def _in_module(path: Sequence[str], space: Mapping[str, Any]) -> str:
    value, inner = space.get(path[0]), path[1:]
    if isinstance(value, ModuleType):
        return _in_module(inner, vars(value)) if inner else ""
    if path[0] not in space and inner and str(space.get("__name__")).rpartition(".")[2] == path[0]:
        return _in_module(inner, space)
    file = space.get("__file__")
    if path[0] not in space or file is None or not (place := _line(file, path[0])):
        return ""
    if isinstance(value, type) and inner:
        return _line(file, inner[0], r"\s+", int(place.rpartition(":")[2])) or place
    return place


def _line(file: str, name: str, indentation: str = "", first: int = 1) -> str:
    sets = re.compile(indentation + _SETS.format(name))
    lines = linecache.getlines(file)[first - 1 :]
    return next((f"{Path(file).name}:{number}" for number, line in enumerate(lines, first) if sets.match(line)), "")
