"""Templates of Helm as trees of text and actions, and their words. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hyperpod_ext.errors import ConfigError, Problem

_ACTION = re.compile(r"\{\{(-\s)?(.*?)(\s-)?\}\}", re.DOTALL)
_WORD = re.compile(
    r"""\s+|(?P<word>"(?:[^"\\]|\\.)*"|`[^`]*`|-?\d+(?:\.\d+)?(?![\w.])|:=|[()|,=]"""
    r"""|\$\w*(?:\.\w+)*|(?:\.\w+)+|\.|[A-Za-z_]\w*)""",
    re.DOTALL,
)
_OPENS = ("if", "range", "with", "define", "block")
_BY_HELM = "fill it first: helm template CHART --values FILE | hp-ext import -"


@dataclass
class Node:
    """Text, or an action with what lies inside of it."""

    line: int
    words: list[str] = field(default_factory=list)
    text: str = ""
    inside: list[Node] = field(default_factory=list)
    otherwise: list[Node] = field(default_factory=list)


def beyond(message: str, source: str, line: int) -> ConfigError:
    """What is said of a template that only Helm itself can fill."""
    return ConfigError([Problem(f"the template of Helm {message}", "", source, line, _BY_HELM)])


def tree(text: str, source: str) -> list[Node]:
    """The template as text and actions.

    Raises:
        ConfigError: its parts do not begin and end as they should.
    """
    top: list[Node] = []
    stack: list[tuple[Node, list[Node]]] = []
    here, at, trims = top, 0, False
    for match in [*_ACTION.finditer(text), None]:
        before = text[at : match.start() if match else len(text)]
        line = text.count("\n", 0, at) + 1
        if trims:
            line += before[: len(before) - len(before.lstrip())].count("\n")
            before = before.lstrip()
        before = before.rstrip() if match and match[1] else before
        if before:
            here.append(Node(line, text=before))
        if match is None:
            break
        at, trims = match.end(), bool(match[3])
        line = text.count("\n", 0, match.start()) + 1
        if match[2].strip().startswith("/*"):
            continue
        node = Node(line, _words(match[2], source, line))
        head = node.words[0] if node.words else ""
        if head in _OPENS:
            here.append(node)
            stack.append((node, here))
            here = node.inside
        elif head in ("else", "end") and not stack:
            raise beyond(f"has {head} without a beginning", source, line)
        elif head == "else" and len(node.words) > 1:  # else if: an if inside, which the same end closes
            opened, _above = stack[-1]
            node.words = node.words[1:]
            opened.otherwise.append(node)
            stack[-1] = (node, stack[-1][1])
            here = node.inside
        elif head == "else":
            here = stack[-1][0].otherwise
        elif head == "end":
            here = stack.pop()[1]
        else:
            here.append(node)
    if stack:
        raise beyond("has a beginning without an end", source, stack[-1][0].line)
    return top


def _words(action: str, source: str, line: int) -> list[str]:
    found, at = [], 0
    while at < len(action):
        match = _WORD.match(action, at)
        if match is None:
            raise beyond(f"has `{action.strip()[:60]}`, which is not read here", source, line)
        found += [match["word"]] if match["word"] else []
        at = match.end()
    return found


def commands_of(words: list[str]) -> list[list[str]]:
    """Commands between the pipes that are in no parentheses."""
    found: list[list[str]] = [[]]
    depth = 0
    for word in words:
        depth += (word == "(") - (word == ")")
        if word == "|" and depth == 0:
            found.append([])
        else:
            found[-1].append(word)
    return found


def text_of(word: str) -> str:
    """What a word in quotes says."""
    if word[0] == "`":
        return word[1:-1]
    return re.sub(r"\\(.)", lambda match: {"n": "\n", "t": "\t"}.get(match[1], match[1]), word[1:-1])
