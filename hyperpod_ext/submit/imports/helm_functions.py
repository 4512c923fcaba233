"""Functions of Helm's templates that job files use; none makes much of little. Pure."""

from __future__ import annotations

import json
import operator
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from hyperpod_ext.submit.contract.yaml_text import to_yaml

_WIDEST = 200
"""Columns of an indent."""


def is_true(value: Any) -> bool:
    """As Go's templates take it: zero and whatever is empty are not; `--set a=false` is text here."""
    return bool(value) and value != "false"


def _number(value: Any) -> int:
    try:
        return int(value or 0)
    except ValueError:
        return 0  # so Helm has it


def _same(first: Any, *others: Any) -> bool:
    return any(_shown(first) == _shown(one) for one in others)


def _index(found: Any, *keys: Any) -> Any:
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else found[key]
    return found


def _indent(width: Any, text: Any) -> str:
    if not 0 <= int(width) <= _WIDEST:
        raise ValueError(f"an indent of {width}")
    return textwrap.indent(str(text), " " * int(width), lambda _line: True)


def _squote(text: Any) -> str:
    return "'" + str(text).replace("'", "''") + "'"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _printf(form: str, *given: Any) -> str:
    if re.search(r"%[^sdvq%]", form):
        raise ValueError(f"printf {form!r}")
    left = list(given)

    def shown(one: re.Match[str]) -> str:
        if one[1] == "%":
            return "%"
        return json.dumps(left.pop(0)) if one[1] == "q" else _shown(left.pop(0))

    return re.sub(r"%([sdvq%])", shown, form)


def _matches(pattern: str, text: Any) -> bool:
    if not re.fullmatch(r"[\w\s^$./-]*", pattern):
        raise ValueError(f"regexMatch {pattern!r}")  # others may look for ever
    return re.search(pattern, str(text)) is not None


def _compared(how: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda left, right: how(left, right)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda *given: sum(_number(one) for one in given),
    "and": lambda *given: given[-1],
    "atoi": _number,
    "contains": lambda part, text: part in text,
    "default": lambda other, value: value or other,
    "empty": lambda value: not value,
    "eq": _same,
    "first": lambda found: found[0],
    "ge": _compared(operator.ge),
    "gt": _compared(operator.gt),
    "hasKey": lambda found, key: key in (found or {}),
    "hasPrefix": lambda part, text: str(text).startswith(part),
    "hasSuffix": lambda part, text: str(text).endswith(part),
    "indent": _indent,
    "index": _index,
    "int": _number,
    "int64": _number,
    "join": lambda sign, found: str(sign).join(_shown(one) for one in found),
    "last": lambda found: found[-1],
    "le": _compared(operator.le),
    "len": len,
    "lower": lambda text: str(text).lower(),
    "lt": _compared(operator.lt),
    "mul": lambda first, *others: _product([first, *others]),
    "ne": lambda left, right: not _same(left, right),
    "nindent": lambda width, text: "\n" + _indent(width, text),
    "not": lambda value: not is_true(value),
    "or": lambda *given: given[-1],
    "printf": _printf,
    "quote": lambda value: json.dumps(_shown(value), ensure_ascii=False),
    "regexMatch": _matches,
    "replace": lambda old, new, text: str(text).replace(old, new),
    "required": lambda _message, value: value,
    "squote": _squote,
    "sub": lambda first, second: _number(first) - _number(second),
    "ternary": lambda yes, no, holds: yes if is_true(holds) else no,
    "toJson": json.dumps,
    "toString": _shown,
    "toYaml": to_yaml,
    "trim": lambda text: str(text).strip(),
    "trimSuffix": lambda part, text: str(text).removesuffix(part),
    "trunc": lambda length, text: str(text)[: int(length)],
    "upper": lambda text: str(text).upper(),
}


def _product(given: list[Any]) -> int:
    found = 1
    for one in given:
        found *= _number(one)
        if abs(found) > 2**63:
            raise ValueError("a number that no job has")
    return found
