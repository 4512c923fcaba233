"""Modules that a script imports in its first statements. The script is parsed, but never executed."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Set
from pathlib import Path

from hyperpod_ext.jobs.rules.script_code import parse_file


def first_imports(script: Path, passed: Set[str] = frozenset()) -> list[str]:
    """Return the third-party modules, and the attributes of modules, that the script imports in its first statements.

    The search ends at the first statement that is not an import, and at the first import from the script's own folder.
    Later imports are left out, because they may depend on environment variables that other code sets. Modules of the
    standard library are left out.

    Args:
        passed: names of functions whose calls without arguments do not end the search.
    """
    found: dict[str, None] = {}
    for root, name in _leading_imports(script, passed):
        if (script.parent / root).exists() or (script.parent / f"{root}.py").exists():
            break
        if root not in sys.stdlib_module_names and importlib.util.find_spec(root) is not None:
            found[name] = None
    return list(found)


def _leading_imports(script: Path, passed: Set[str]) -> Iterator[tuple[str, str]]:
    """Yield package and full name of each import that comes before the first statement of another kind."""
    code = parse_file(script)
    for number, node in enumerate(code.body if code is not None else ()):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            root = node.module.partition(".")[0]
            yield from ((root, node.module if a.name == "*" else f"{node.module}.{a.name}") for a in node.names)
        elif (number or not _is_text(node)) and _called(node) not in passed:
            return


def _called(node: ast.stmt) -> str:
    """Return the name of the function that the statement calls without arguments; empty for other statements."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[], keywords=[])):
            return name
    return ""


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
