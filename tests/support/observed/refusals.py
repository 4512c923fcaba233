"""Texts of errors at the places that raise them, read from the source: values are {placeholders}."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ext import errors
from observed.pool import ROOT

CODES = {
    name: found.exit_code
    for name, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, errors.HyperpodExtError)
}
"""Exit code of each class of errors."""
_LEAST = 12
"""Shorter literal texts are words of a sentence, not a message."""
_PLACES = ("hyperpod_ext", "cli")
_MADE = re.compile(r"(?:Error|Problem|Finding)\(")
_BUILT_IN = {"str", "repr", "len", "sorted", "list", "tuple", "sum", "min", "max", "map", "type", "float", "int"}
_LISTS = {"Problem", "Finding"}
"""Entries of a ConfigError."""


@dataclass(frozen=True, order=True)
class Refusal:
    """One place that raises an error."""

    file: str
    line: int
    code: int
    text: str
    """Message, and the hint on a further line."""


def refusals() -> list[Refusal]:
    """Every place in the product that raises an error which users can see, or reports a problem."""
    files = sorted(file for place in _PLACES for file in (ROOT / place).rglob("*.py"))
    return sorted({one for file in files for one in _in_file(file)})


def _in_file(file: Path) -> Iterator[Refusal]:
    text = file.read_text()
    if _MADE.search(text):
        tree = ast.parse(text)
        found: dict[int, tuple[ast.AST, list[ast.Call]]] = {}
        _collect(tree, tree, found)
        for function, calls in found.values():
            texts = _texts(function)
            for call in calls:
                yield from _read(str(file.relative_to(ROOT)), call, texts)


def _collect(node: ast.AST, function: ast.AST, found: dict[int, tuple[ast.AST, list[ast.Call]]]) -> None:
    """Add the calls that make an error below a node, each with the innermost function around it."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = node
    if isinstance(node, ast.Call) and _kind(node) in CODES.keys() | _LISTS:
        found.setdefault(id(function), (function, []))[1].append(node)
    for child in ast.iter_child_nodes(node):
        _collect(child, function, found)


def _texts(function: ast.AST) -> list[tuple[int, str, ast.expr]]:
    """Assignments of a function to single names: line, name, value. None at the level of a module."""
    if isinstance(function, ast.Module):
        return []
    found = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    return [
        (node.lineno, target.id, node.value)
        for node in found
        for target in node.targets
        if isinstance(target, ast.Name)
    ]


def _kind(call: ast.Call) -> str:
    return str(getattr(call.func, "id", getattr(call.func, "attr", "")))


def _read(file: str, call: ast.Call, texts: list[tuple[int, str, ast.expr]]) -> Iterator[Refusal]:
    kind = _kind(call)
    given = {word.arg: word.value for word in call.keywords}
    own = {"Finding": (1, 2)}.get(kind, (0, None))
    parts = [call.args[at] if at is not None and len(call.args) > at else None for at in own]
    path = given.get("path")
    message, hint = parts[0], given.get("hint", parts[1])
    if message is None or isinstance(message, ast.List | ast.ListComp | ast.Tuple | ast.Starred):
        return  # a list of problems, each of which is read where it is made
    known = {name: value for line, name, value in sorted(texts, key=lambda one: one[0]) if line <= call.lineno}
    where = f"{_written(path, known)}: " if path is not None else ""
    says = [where + _written(message, known), *([_written(hint, known)] if hint is not None else [])]
    if len(re.sub(r"\{[^}]*\}", "", says[0])) >= _LEAST:
        code = CODES.get(kind, errors.ConfigError.exit_code)
        yield Refusal(file, call.lineno, code, "\n".join(one for one in says if one))


def _written(value: ast.expr, known: dict[str, ast.expr], depth: int = 0) -> str:
    """The text of an expression. A name stands for the text that was assigned to it."""
    match value:
        case ast.Constant(value=constant):
            return str(constant)
        case ast.JoinedStr(values=values):
            return "".join(_written(one, known, depth) for one in values)
        case ast.FormattedValue(value=inner):
            return _placeholder(inner)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _written(left, known, depth) + _written(right, known, depth)
        case ast.IfExp(body=body, orelse=orelse):
            both = [_written(one, known, depth) for one in (body, orelse)]
            return " | ".join(one for one in both if one)
        case ast.Name(id=name) if depth < 2 and isinstance(known.get(name), ast.Constant | ast.JoinedStr | ast.IfExp):
            return _written(known[name], known, depth + 1)
    return _placeholder(value)


def _placeholder(value: ast.expr) -> str:
    """A short name of a value, such as {rank} for self._place.rank."""
    match value:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return f"{{{name.strip('_')}}}"
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[inner]):
            return _placeholder(inner)
        case ast.Call(func=ast.Name(id=name)) if name not in _BUILT_IN:
            return f"{{{name.strip('_')}}}"
        case ast.Call(func=ast.Name(), args=[inner, *_]) | ast.Subscript(value=inner) | ast.GeneratorExp(elt=inner):
            return _placeholder(inner)
        case ast.Call(func=ast.Attribute() as inner):
            return _placeholder(inner)
        case ast.BinOp(left=left):
            return _placeholder(left)
        case ast.ListComp(elt=inner):
            return _placeholder(inner)
        case ast.Constant(value=constant):
            return str(constant)
    return "{value}"
