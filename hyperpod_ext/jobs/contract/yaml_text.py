"""YAML for Kubernetes, and text escaped for fields in which Kubernetes replaces `$(NAME)` with a variable's value."""

from __future__ import annotations

import functools
import re
import textwrap
from typing import Any

import yaml

_PLAIN = re.compile(r"[A-Za-z/][-A-Za-z0-9_./]*")
_WIDTH = 10_000
_LONGEST_KEY = 100
_OTHER_THAN_TEXT = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})
"""Words that some YAML parsers (1.1 or 1.2) read as a boolean, null or number instead of text."""


class _Dumper(yaml.SafeDumper):
    """Quotes every text that some YAML parser could read as a number, date or boolean."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True, so that the YAML has no anchors and aliases, which are hard to read and to edit."""
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent the items of lists, which PyYAML does not do by default."""
        super().increase_indent(flow, False)


def _style(text: str) -> str | None:
    if _PLAIN.fullmatch(text) and text.lower() not in _OTHER_THAN_TEXT:
        return None
    return "|" if "\n" in text.rstrip("\n") and _is_block(text) else '"'


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=_style(text))


def _is_block(text: str) -> bool:
    """Return whether `text` can be written as a literal block (`|`) of YAML.

    A literal block cannot contain unprintable characters, an empty last line, or lines with trailing blanks.
    """
    lines = text.removesuffix("\n").split("\n")
    shown = all(line == line.rstrip() and line.isprintable() for line in lines)
    return shown and bool(lines[-1]) and lines[0][:1] > " "


_Dumper.add_representer(str, _text)


def read_all(text: str) -> list[Any]:
    """Parse all documents of `text`, with the C loader of PyYAML if it is available."""
    return list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def to_yaml(data: object, indent: int = 0) -> str:
    """Return `data` as YAML, with keys in the order of `data`, and without a final newline.

    Args:
        indent: number of spaces before each line.
    """
    try:
        first, *rest = _lines(data)
        pad = "" if isinstance(data, dict | list) else "  "
        text = "\n".join([first, *(f"{pad}{line}" if line else "" for line in rest)])
    except _OddError:
        text = dumped(data)
    return textwrap.indent(text, " " * indent)


def dumped(data: object) -> str:
    """Return `data` as YAML written by PyYAML. `to_yaml` returns the same text ten times faster."""
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH, default_flow_style=False)
    return text.rstrip("\n").removesuffix("\n...")


class _OddError(Exception):
    """Raised for a key or line that PyYAML may wrap, in which case `to_yaml` lets PyYAML write the whole text."""


def _lines(data: object) -> list[str]:
    if isinstance(data, str):
        return _words(data)
    if not isinstance(data, dict | list) or not data:
        return [str(data) if type(data) is int else dumped(data)]
    found: list[str] = []
    for key, value in data.items() if isinstance(data, dict) else (("-", one) for one in data):
        head = "-" if isinstance(data, list) else f"{_key(key)}:"
        first, *rest = _lines(value)
        if isinstance(value, dict | list) and value and isinstance(data, dict):
            found += [head, f"  {first}"]
        else:
            found.append(f"{head} {first}")
        found += [f"  {line}" if line else "" for line in rest]
    return found


def _key(key: object) -> str:
    if not isinstance(key, str) or len(key) > _LONGEST_KEY or not key or not key.isprintable():
        raise _OddError
    return _words(key)[0]


@functools.lru_cache(maxsize=4096)
def _words(text: str) -> list[str]:
    """Return `text` as lines of YAML. The caller must indent the lines of a literal block."""
    if _style(text) == "|":
        return ["|" if text.endswith("\n") else "|-", *text.removesuffix("\n").split("\n")]
    shown = dumped(text)
    if len(shown) > _WIDTH // 2:
        raise _OddError
    return [shown]


def literal(text: str) -> str:
    """Escape `text` for a field in which Kubernetes replaces `$(NAME)`.

    Kubernetes turns `$$` into `$`, reads `$(` as the beginning of a variable's name, and leaves other `$` unchanged.
    """
    return re.sub(r"\$+(\(?)", _doubled, text)


def _doubled(match: re.Match[str]) -> str:
    dollars = match[0].removesuffix("(")
    if len(dollars) == 1 and not match[1]:
        return match[0]
    return dollars * 2 + match[1]
