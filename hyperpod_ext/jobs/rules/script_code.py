"""Code of a job's script. The script is parsed, but never executed."""

from __future__ import annotations

import ast
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path

_MOST_BYTES, _MOST_FILES, _DEEPEST = 1 << 20, 50, 3
"""Maximum total size in bytes of the parsed files, maximum number of files, and maximum length of import chains."""

Code = list[ast.AST]
"""All nodes of a file's syntax tree."""


def parse_file(file: Path) -> ast.Module | None:
    """Parse a Python file; return None if the file does not exist, has more than 1 MiB, or is not valid Python.

    Invalid Python is no error here, because the job itself reports it when it starts.
    """
    text = _text(file, _MOST_BYTES)
    return None if text is None else _module(text)


def read_all(script: Path) -> list[Code]:
    """Parse the script and the modules that it imports from its folder; return one list of nodes for each file.

    The result is empty if a file cannot be read, or a limit of this module is exceeded.
    """
    read, left, waiting = dict[Path, Code](), _MOST_BYTES, deque([(script, 0)])
    while waiting:
        file, depth = waiting.popleft()
        if file in read:
            continue
        text = _text(file, left)
        code = None if text is None or depth > _DEEPEST or len(read) == _MOST_FILES else _parse(text)
        if text is None or code is None:
            return []
        read[file], left = code, left - len(text)
        waiting += [(each, depth + 1) for each in _local_imports(code, file, script.parent)]
    return list(read.values())


def _text(file: Path, most: int) -> bytes | None:
    """Return the content of a regular file of at most `most` bytes; None for any other file."""
    try:
        return file.read_bytes() if file.is_file() and file.stat().st_size <= most else None
    except OSError:
        return None


def _parse(text: bytes) -> Code | None:
    """Return all nodes of the syntax tree of `text`; None if `text` is not valid Python."""
    module = _module(text)
    return None if module is None else list(ast.walk(module))


def _module(text: bytes) -> ast.Module | None:
    try:
        with warnings.catch_warnings(action="ignore"):  # ignore warnings about the script's style
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _local_imports(code: Code, file: Path, folder: Path) -> Iterator[Path]:
    """Yield the files below `folder`, the script's folder, that `file` imports.

    Args:
        code: syntax tree nodes of `file`.
    """
    for level, name in imports(code):
        path = file.parents[level - 1] if level else folder
        for part in filter(None, name.split(".")):
            path = path / part
            yield from (each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file())


def imports(code: Code) -> Iterator[tuple[int, str]]:
    """Yield the level (number of leading dots) and the full name of each import.

    In `from a import b`, the yielded name is `a.b`, because b may be a module.
    """
    for node in code:
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.level, f"{node.module or ''}.{alias.name}") for alias in node.names)
