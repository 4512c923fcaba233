"""Fills Jinja templates, with conditions and loops, with given values. Pure.

Templates are untrusted, and even a short template can exhaust a machine's memory. Only a safe subset of Jinja is
therefore allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, UndefinedError, meta, nodes
from jinja2.sandbox import SandboxedEnvironment

from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.jobs.imports.how import HOW

_PLAIN: tuple[type[nodes.Node], ...] = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign),
    *(nodes.Name, nodes.Const, nodes.Getattr, nodes.Getitem, nodes.Call, nodes.Filter, nodes.Test, nodes.CondExpr),
    *(nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.Keyword, nodes.Add, nodes.Concat, nodes.Sub, nodes.Neg),
    *(nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not),
)
_FILTERS = {"d", "default", "first", "float", "int", "items", "join", "last", "length", "lower", "replace", "round"}
_FILTERS |= {"sort", "string", "title", "tojson", "trim", "upper"}
_LOOPS = 2
"""Maximum nesting of loops. The number of iterations of each loop is also limited: loops run only over given values, or
over at most 1000 numbers."""
_MOST_ROUNDS = 1000
_LARGEST = 4 * 2**20
"""Maximum number of characters of a filled template. Real job files are far shorter than this limit."""


def fill_jinja(text: str, values: Mapping[str, Any], source: str) -> tuple[str, list[Problem]]:
    """Return the filled `text`, and a note for each default that was used.

    Args:
        source: name of the file for messages.

    Raises:
        ConfigError: values are missing (the error names each of them), or the template is outside the safe subset.
    """
    environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.globals["range"] = _numbers
    hint = "render the template first, and import the result"
    try:
        parsed = environment.parse(text)
        if (line := next(_beyond(parsed), None)) is not None:
            message = "the template uses a part of Jinja that import does not support"
            raise ConfigError([Problem(message, source=source, line=line, hint=hint)])
        needed, optional = _names(parsed, values)
        if not needed:
            filled = ""
            for part in environment.from_string(text).generate(**values):
                filled += part
                if len(filled) > _LARGEST:
                    raise ValueError(f"it has more than {_LARGEST} characters when filled")
            what = "has no value: its default, or the branch without it, is used"
            return filled, [_about(what, name, source, line) for name, line in optional.items()]
    except TemplateSyntaxError as error:
        raise ConfigError(
            [Problem(f"is not a valid Jinja template: {error.message}", "", source, error.lineno, hint)]
        ) from None
    except (UndefinedError, TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise ConfigError([Problem(f"the template cannot be filled: {error}", source=source)]) from None
    lists = {loop.iter.name for loop in parsed.find_all(nodes.For) if isinstance(loop.iter, nodes.Name)}
    missing = "the template needs a value for {}"
    raise ConfigError([_about(missing.format(n), n, source, line, n in lists) for n, line in needed.items()])


def _about(what: str, name: str, source: str, line: int, is_list: bool = False) -> Problem:
    how = "set it with --values FILE, because the template needs a list" if is_list else HOW.format(name=name)
    return Problem(what, name, source, line, how)


def _names(parsed: nodes.Template, values: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the names in the template that have no value, with the line of their first use.

    The first returned dictionary has required names, the second has names with a default or an `is defined` test.
    """
    open_ones = meta.find_undeclared_variables(parsed) - set(values) - {"range"}
    lines: dict[str, int] = {}
    for one in parsed.find_all(nodes.Name):
        lines.setdefault(one.name, one.lineno)
    asked = [one.node for one in parsed.find_all(nodes.Filter) if one.name in ("d", "default")]
    asked += [one.node for one in parsed.find_all(nodes.Test) if one.name in ("defined", "undefined")]
    spared = {id(one) for one in asked}
    needed = {one.name for one in parsed.find_all(nodes.Name) if id(one) not in spared} & open_ones
    return (
        {name: lines[name] for name in sorted(needed)},
        {name: lines[name] for name in sorted(open_ones - needed)},
    )


def _numbers(*bounds: int) -> range:
    found = range(*bounds)
    if len(found) > _MOST_ROUNDS:
        raise ValueError(f"a loop has more than {_MOST_ROUNDS} rounds")
    return found


def _beyond(node: nodes.Node, loops: int = 0) -> Iterator[int]:
    """Yield the line of each part of the template that is outside the safe subset.

    Args:
        loops: number of loops that contain `node`.
    """
    fits = isinstance(node, _PLAIN)
    if isinstance(node, nodes.Filter):
        fits = node.name in _FILTERS
    elif isinstance(node, nodes.Call):
        called = node.node
        fits = isinstance(called, nodes.Name) and called.name == "range"
        fits |= isinstance(called, nodes.Getattr) and called.attr in ("items", "keys", "values", "get")
    elif isinstance(node, nodes.Assign):
        # refuse `+` and `~`: a loop that appends a value to itself would double the value in each round
        fits = node.find(nodes.Add) is None and node.find(nodes.Concat) is None
    elif isinstance(node, nodes.For):
        loops += 1
        fits = loops <= _LOOPS
    if not fits:
        yield node.lineno
    for below in node.iter_child_nodes():
        yield from _beyond(below, loops)
