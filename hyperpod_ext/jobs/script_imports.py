"""Modules that a script imports before it does anything else. The script is parsed, and never executed."""

from __future__ import annotations

import ast
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path


def first_imports(script: Path) -> list[str]:
    """Return installed modules, and names in them, that the script's first statements import.

    Only imports before any other statement count, and before an import of the script's own folder: later ones may
    depend on what those do, for example on environment variables that they set. The standard library is left out.
    """
    found: dict[str, None] = {}
    for root, name in _leading_imports(script):
        if (script.parent / root).exists() or (script.parent / f"{root}.py").exists():
            break
        if root not in sys.stdlib_module_names and importlib.util.find_spec(root) is not None:
            found[name] = None
    return list(found)


def _leading_imports(script: Path) -> Iterator[tuple[str, str]]:
    """Yield package and full name of each import before the first other statement."""
    for number, node in enumerate(_statements(script)):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            root = node.module.partition(".")[0]
            yield from ((root, node.module if a.name == "*" else f"{node.module}.{a.name}") for a in node.names)
        elif number or not _is_text(node):
            return


def _statements(script: Path) -> list[ast.stmt]:
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(script.read_bytes()).body
    except (SyntaxError, ValueError, RecursionError):
        return []  # its start reports that


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
