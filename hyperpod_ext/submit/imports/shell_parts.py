"""Small parts of reading shell: where an expansion ends, words of a value, numbers, branches. Pure."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

_OPERATORS: dict[type, Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub}
_OPERATORS |= {ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod}


def number_of(node: ast.expr) -> int:
    """What an expression of whole numbers comes to; those of a script that trains are small, and none is negative."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        found = _OPERATORS[type(node.op)](number_of(node.left), number_of(node.right))
        if 0 <= found < 2**63:
            return found
    raise ValueError("no number that is worked out here")


def is_known(words: list[str]) -> bool:
    """Whether the shell would find nothing in them that it replaces."""
    return not any(re.search(r"[$`*?\[\]{}~\n\r\x00]", word) for word in words)


def branch(node: Any) -> tuple[Any | None, list[Any]]:
    """Condition of an if, an elif or an else, and its statements."""
    conditions: list[Any] = []
    body: list[Any] = []
    past = node.type == "else_clause"
    for child in node.children:
        if child.type == "then":
            past = True
        elif child.is_named and child.type not in ("elif_clause", "else_clause", "comment"):
            (body if past else conditions).append(child)
    return (conditions[0] if conditions else None), body


def end_of(text: str, at: int) -> int:
    """Where the expansion that begins at `at` ends."""
    opened = text[at + 1 : at + 2]
    if opened not in ("{", "("):
        match = re.compile(r"[A-Za-z_]\w*|\d|.?", re.DOTALL).match(text, at + 1)
        return match.end() if match else at + 1
    depth, closing = 0, {"{": "}", "(": ")"}[opened]
    for index in range(at + 1, len(text)):
        depth += (text[index] == opened) - (text[index] == closing)
        if depth == 0:
            return index + 1
    return len(text)


def split_words(text: str) -> list[str]:
    """The words that the shell makes of a value without quotes; what a `$(...)` or `${...}` holds is one."""
    found, at, begun = [""], 0, False
    while at < len(text):
        if text[at] == "$" and text[at + 1 : at + 2] in ("(", "{"):
            end = end_of(text, at)
        elif text[at] == "`":
            end = text.find("`", at + 1) + 1 or len(text)
        else:
            end = at + 1
        if text[at].isspace():
            found += [""] * begun
            begun = False
        else:
            found[-1] += text[at:end]
            begun = True
        at = end
    return [word for word in found if word]


def assigned_in(node: Any) -> set[str]:
    """Variables that a statement sets somewhere, when it is run."""
    found, left = set(), [node]
    while left:
        one = left.pop()
        if one.type == "function_definition":
            continue  # what it sets, it sets when it is called
        if one.type in ("variable_assignment", "for_statement"):
            name = one.child_by_field_name("name" if one.type == "variable_assignment" else "variable")
            if name is not None:
                found.add(name.text.decode().partition("[")[0])
        if one.type == "command" and (words := one.text.decode().split())[:1] in (["read"], ["mapfile"], ["readarray"]):
            found |= {word for word in words[1:] if re.fullmatch(r"[A-Za-z_]\w*", word)}
        left += one.named_children
    return found


def shown(command: str) -> str:
    """The first line of a command that is not run, and what its other lines would have exported."""
    first, _, rest = command.strip().partition("\n")
    names = list(dict.fromkeys(re.findall(r"\bexport\s+(?:-\w+\s+)*(\w+)", rest)))
    return first[:100] + (f" (exports {', '.join(names)})" if names else "")
