"""Helpers to read shell scripts: ends of expansions, words of a value, arithmetic, branches. Pure."""

from __future__ import annotations

import ast
import fnmatch
import operator
import posixpath
import re
from collections.abc import Callable
from typing import Any

_OPERATORS: dict[type, Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub}
_OPERATORS |= {ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod}


def number_of(node: ast.expr) -> int:
    """Evaluate an arithmetic expression of whole numbers.

    Raises:
        ValueError: the expression has another form, or a result is negative or not below 2**63.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        found = _OPERATORS[type(node.op)](number_of(node.left), number_of(node.right))
        if 0 <= found < 2**63:
            return found
    raise ValueError("an expression that import cannot evaluate")


_LONGEST = 4096
"""Maximum number of characters of a value that is matched with patterns. All paths are shorter."""


def is_quick(value: str, pattern: str) -> bool:
    """Return whether matching `value` with `pattern` is fast.

    Long values and many `*` in the pattern are slow, because each `*` multiplies the time.
    """
    return len(value) <= _LONGEST and pattern.count("*") <= 3


def changed(value: str, how: str) -> str | None:
    """Return `value` changed by a parameter expansion of the shell; None if the expansion is not supported.

    Args:
        how: part of the expansion after the variable's name, such as `%.yaml` in `${FILE%.yaml}`.
    """
    if match := re.fullmatch(r"(%%?|##?)(.*)", how, re.DOTALL):
        return _trimmed(value, match[1], match[2]) if is_quick(value, match[2]) else None
    if match := re.fullmatch(r":\s*(\d+)(?::\s*(\d+))?", how):
        return value[int(match[1]) :][: int(match[2]) if match[2] else None]
    if (match := re.fullmatch(r"/(/?)([^/]+)/([^/]*)", how)) and not re.search(r"[*?\[]", match[2]):
        if value.count(match[2]) * len(match[3]) > _LONGEST:
            return None
        return value.replace(match[2], match[3], -1 if match[1] else 1)
    cases: dict[str, Callable[[str], str]] = {"^^": str.upper, ",,": str.lower}
    return cases[how](value) if how in cases else None


def _trimmed(value: str, sign: str, pattern: str) -> str:
    """Remove the suffix (`%`) or prefix (`#`) of `value` that matches `pattern`.

    A single sign removes the shortest match, a double sign (`%%`, `##`) the longest.
    """
    places = range(len(value) + 1)
    if sign[0] == "%":
        found = [at for at in places if fnmatch.fnmatchcase(value[at:], pattern)]
        return value[: (min if len(sign) == 2 else max)(found)] if found else value
    found = [at for at in places if fnmatch.fnmatchcase(value[:at], pattern)]
    return value[(max if len(sign) == 2 else min)(found) :] if found else value


def path_printed(words: list[str], here: str) -> str | None:
    """Return the output of `pwd`, `dirname A`, `basename A .b` or `cd A && pwd`; None if the output is not known.

    Args:
        words: words of the command.
        here: current folder; empty if unknown.
    """
    match words:
        case ["pwd"] | ["pwd", "-P"]:
            return here or None
        case ["dirname", path] if path.startswith("/"):
            return posixpath.dirname(path.rstrip("/")) or "/"
        case ["basename", path]:
            return posixpath.basename(path.rstrip("/"))
        case ["basename", path, ending]:
            return posixpath.basename(path.rstrip("/")).removesuffix(ending)
        case ["cd", path, "&&", "pwd"] if (here or path).startswith("/"):
            return posixpath.normpath(posixpath.join(here, path))
    return None


_HEREDOC = re.compile(
    r"<<-?\s*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)[^\n]*\n(?P<text>.*)\n\s*(?P=end)\s*\)?\s*\Z", re.DOTALL
)


def heredoc(text: str) -> tuple[str, bool] | None:
    """Return a command's here-document, and whether the shell expands its variables; None without a here-document."""
    match = _HEREDOC.search(text)
    if match is None:
        return None
    return (match["text"], False) if match["quote"] else (match["text"].replace("\\\n", ""), True)


def is_known(words: list[str]) -> bool:
    """Return whether the words contain nothing that the shell would expand."""
    return not any(re.search(r"[$`*?\[\]{}~\n\r\x00]", word) for word in words)


def branch(node: Any) -> tuple[Any | None, list[Any]]:
    """Return the condition (None for `else`) and the statements of an `if`, `elif` or `else` branch."""
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
    """Return the index after the end of the shell expansion (`$NAME`, `${...}`, `$(...)`) that begins at index `at`."""
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
    """Split an unquoted value into words at blanks. Blanks within `$(...)`, `${...}` or backticks do not split."""
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
    """Return the names of the variables that a statement may set."""
    found, left = set(), [node]
    while left:
        one = left.pop()
        if one.type == "function_definition":
            continue  # a function sets variables only when it is called
        if one.type in ("variable_assignment", "for_statement"):
            name = one.child_by_field_name("name" if one.type == "variable_assignment" else "variable")
            if name is not None:
                found.add(name.text.decode().partition("[")[0])
        if one.type == "command" and (words := one.text.decode().split())[:1] in (["read"], ["mapfile"], ["readarray"]):
            found |= {word for word in words[1:] if re.fullmatch(r"[A-Za-z_]\w*", word)}
        left += one.named_children
    return found


def shown(command: str) -> str:
    """Return the beginning of a command for messages.

    For a long command, the length is added; for several lines, the names of the variables that later lines export.
    """
    first, _, rest = command.strip().replace("\\\n", " ").partition("\n")
    if rest and not re.match(r"(for|while|until|if|case|\(|\{)\b", first):
        first, rest = f"{first} {rest}", ""
    first = " ".join(first.split())
    names = list(dict.fromkeys(re.findall(r"\bexport\s+(?:-\w+\s+)*(\w+)", rest)))
    long = f" ... ({len(first)} characters)" if len(first) > 100 else ""
    return first[:100] + long + (f" (exports {', '.join(names)})" if names else "")


SIMPLE = {"command", "variable_assignment", "declaration_command", "unset_command", "test_command"}
SIMPLE |= {"negated_command", "pipeline", "redirected_statement"}
"""Types of syntax tree nodes for simple statements. Only pipelines and redirected statements contain other simple
statements."""
_BODIES = {"compound_statement", "subshell", "do_group", "if_statement", "elif_clause", "else_clause", "list", "ERROR"}
_BODIES |= {"case_statement", "case_item", "for_statement", "c_style_for_statement", "while_statement", "program"}
_BODIES |= {"function_definition", "variable_assignments"}
_HEADED = {"for_statement": {"do_group"}, "c_style_for_statement": {"do_group", "compound_statement"}}
"""Types of nodes of `for` loops, with the types of their children that contain the loop's statements."""


def statements_of(root: Any) -> dict[int, tuple[str, int]]:
    """Return text and line of each simple statement of a script, by the position of the statement's first byte."""
    found: dict[int, tuple[str, int]] = {}
    left = [root]
    while left:
        node = left.pop()
        children = [one for one in node.children if one.is_named]
        if node.type in _HEADED:
            children = [one for one in children if one.type in _HEADED[node.type]]
        if node.type in SIMPLE and not (node.type == "redirected_statement" and children[0].type in _BODIES):
            for one in lines_apart(node):
                found[one.start_byte] = one.text.decode(), one.start_point[0] + 1
            first = rest_of(node)
            text = node.text[first.start_byte - node.start_byte :].decode()
            found[first.start_byte] = text, first.start_point[0] + 1
        if node.type not in SIMPLE or node.type in ("pipeline", "redirected_statement"):
            left += [one for one in children if one.type in _BODIES or (node.type in _BODIES and one.type in SIMPLE)]
    return dict(sorted(found.items()))


def lines_apart(command: Any) -> list[Any]:
    """Return the assignments in a command's syntax tree that are separate statements, on lines above the command."""
    named = [child for child in command.named_children if child.type == "variable_assignment"]
    called = command.child_by_field_name("name") if command.type == "command" else None
    if called is None:
        return []

    def ends(start: int) -> bool:
        """Return whether a line ends, without a backslash, between position `start` and the command."""
        between = command.text[start - command.start_byte : called.start_byte - command.start_byte].decode()
        return re.search(r"(?<!\\)\n", between) is not None

    return [one for one in named if ends(one.end_byte)]


def rest_of(command: Any) -> Any:
    """Return the first part of a command after the assignments that `lines_apart` returns.

    If `lines_apart` returns no assignments, return the command itself.
    """
    apart = lines_apart(command)
    return next(one for one in command.children if one.start_byte > apart[-1].start_byte) if apart else command
