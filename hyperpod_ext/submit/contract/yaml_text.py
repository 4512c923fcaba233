"""Data as the YAML that Kubernetes reads, and text that Kubernetes hands on letter for letter."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import yaml

_PLAIN = re.compile(r"[A-Za-z/][-A-Za-z0-9_./]*")
_OTHER_THAN_TEXT = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})
"""Words that some reader of YAML 1.1 or 1.2 takes for something else than text."""


class _Dumper(yaml.SafeDumper):
    """Quotes every text that any YAML reader could take for a number, a date or a truth value."""

    def ignore_aliases(self, data: Any) -> bool:
        """Say everything in full: anchors are hard to read, and to change."""
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Lists are indented, as people write them."""
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"'
    if _PLAIN.fullmatch(text) and text.lower() not in _OTHER_THAN_TEXT:
        style = ""
    elif "\n" in text.rstrip("\n") and _is_block(text):
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style or None)


def _is_block(text: str) -> bool:
    """Whether a literal block shows `text` as it is: no trailing blanks, no odd characters, no leading blank."""
    return all(line == line.rstrip() and line.isprintable() for line in text.split("\n")) and not text.startswith(
        (" ", "\n")
    )


_Dumper.add_representer(str, _text)


def read_all(text: str) -> list[Any]:
    """All documents of `text`, as plain data; the fast reader, where PyYAML was built with it."""
    return list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def to_yaml(data: object, indent: int = 0) -> str:
    """`data` as YAML in the order it has, each line indented by `indent`; ends without a newline."""
    dumped = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000, default_flow_style=False
    )
    return textwrap.indent(dumped.rstrip("\n").removesuffix("\n..."), " " * indent)


def literal(text: str) -> str:
    """`text` for a field in which Kubernetes replaces `$(NAME)`, so that it arrives as it was written.

    Kubernetes reads `$$` as one `$`, and `$(` as the beginning of a name; other dollars are left alone.
    """
    return re.sub(r"\$+(\(?)", _doubled, text)


def _doubled(match: re.Match[str]) -> str:
    dollars = match[0].removesuffix("(")
    if len(dollars) == 1 and not match[1]:
        return match[0]
    return dollars * 2 + match[1]
