"""Small changes at random places of the product: where one can be made, and what it makes of the text."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRODUCT = ("hyperpod_ext", "cli", "cdk")
_OTHER: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Eq: ("!=",), ast.NotEq: ("==",), ast.Is: ("is not",), ast.IsNot: ("is",), ast.In: ("not in",),
    ast.NotIn: ("in",), ast.Lt: ("<=", ">="), ast.LtE: ("<", ">"), ast.Gt: (">=", "<="), ast.GtE: (">", "<"),
}  # fmt: skip
Change = Callable[[random.Random], str]
_SKIPPED = {"annotation", "returns", "decorator_list", "type_comment", "format_spec"}
_TEXTS = {"help", "hint", "description"}
"""Arguments that are words for people."""


@dataclass(frozen=True)
class Site:
    """A node that can be changed."""

    file: str
    kind: str
    node: Any
    change: Change
    """Text that replaces the node's."""
    lines: tuple[int, ...]
    """Its own line, and that of its statement."""
    inside: bool
    """Whether it is in a function: other code runs when the module is imported."""


@dataclass(frozen=True)
class Drawn:
    """A change, made."""

    site: Site
    before: str
    after: str
    text: str
    """The changed file."""

    @property
    def name(self) -> str:
        return f"{self.site.file}:{self.site.lines[0]} {self.site.kind}"


def draw(root: Path, seed: int, count: int, only: str = "") -> list[Drawn]:
    """`count` changes: each kind equally likely, and each of its places. `only`: beginning of the paths of files."""
    rng = random.Random(seed)
    texts = {name: (root / name).read_text() for name in files(root) if name.startswith(only)}
    by_kind: dict[str, list[Site]] = {}
    for site in (site for name, text in texts.items() for site in sites(name, text)):
        by_kind.setdefault(site.kind, []).append(site)
    drawn: list[Drawn] = []
    while by_kind and len(drawn) < count:
        places = by_kind[kind := rng.choice(sorted(by_kind))]
        site = places.pop(rng.randrange(len(places)))
        if (made := make(site, texts[site.file], rng)) is not None:
            drawn.append(made)
        if not places:
            del by_kind[kind]
    return drawn


def files(root: Path) -> list[str]:
    """All Python files of the product."""
    found = [file.relative_to(root) for folder in PRODUCT for file in (root / folder).rglob("*.py")]
    return sorted(str(file) for file in found if not any(part.startswith(".") for part in file.parts))


def make(site: Site, text: str, rng: random.Random) -> Drawn | None:
    """The change of a site; None if the text is no Python then, or means the same."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    node, data = site.node, text.encode()
    begin = starts[node.lineno - 1] + node.col_offset
    end = starts[node.end_lineno - 1] + node.end_col_offset
    after = site.change(rng)
    changed = (data[:begin] + after.encode() + data[end:]).decode()
    try:
        same = ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text))
    except SyntaxError:
        return None
    return None if same else Drawn(site, data[begin:end].decode(), after, changed)


def sites(file: str, text: str) -> Iterator[Site]:
    """All places of a file where a change can be made."""
    yield from _within(file, ast.parse(text), 0, False)


def _within(file: str, node: ast.AST, line: int, inside: bool) -> Iterator[Site]:
    if isinstance(node, ast.stmt):
        line = node.lineno
    for kind, changed, change in _changes(node):
        yield Site(file, kind, changed, change, tuple(dict.fromkeys((changed.lineno, line))), inside)
    deeper = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in _SKIPPED and not _is_left_out(child):
                yield from _within(file, child, line, inside if name == "args" else deeper)


def _is_left_out(node: ast.AST) -> bool:
    """Docstrings, and code that only a type checker sees."""
    match node:
        case ast.Expr(value=ast.Constant()) | ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.JoinedStr():
            return True
        case ast.keyword(arg=name):
            return name in _TEXTS
    return False


def _changes(node: Any) -> Iterator[tuple[str, Any, Change]]:
    """Kind of change, the node that is replaced, and its new text."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield "comparison", node, lambda rng: f"({_text(left)} {rng.choice(_OTHER[type(op)])} {_text(right)})"
        case ast.Constant(value=bool(value)):
            yield "constant", node, lambda _rng: str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", node, lambda rng: f"({value + rng.choice([-1, 1])!r})"
        case ast.If():
            yield "branch", node.test, lambda _rng: "False"
        case ast.BoolOp(op=op, values=values):
            other = " or " if isinstance(op, ast.And) else " and "
            yield "boolean", node, lambda _rng: "(" + other.join(f"({_text(one)})" for one in values) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "boolean", node, lambda _rng: f"bool({_text(operand)})"
        case ast.Call(args=args, keywords=keywords) if droppable := [
            *args[1:][-1:],  # calls with no argument left mostly do not run at all
            *(one for one in keywords if one.arg not in _TEXTS),
        ]:
            yield "argument", node, lambda rng: _without(node, rng.choice(droppable))
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return value", node, lambda _rng: "return None"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield "statement", node, lambda _rng: "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement", node, lambda _rng: "pass"


_text = ast.unparse


def _without(call: ast.Call, gone: ast.AST) -> str:
    args = [one for one in call.args if one is not gone]
    return _text(ast.Call(call.func, args, [one for one in call.keywords if one is not gone]))
