"""Copies of a job file that each lack one field, option, statement or word; line numbers stay as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from hyperpod_ext.jobs.imports.shell_parts import SIMPLE, statements_of

_WORDS = {"word", "string", "raw_string", "concatenation", "simple_expansion", "expansion", "number"}
_WORDS |= {"command_substitution", "ansi_c_string"}
Deletion = tuple[str, str]
"""A name of what is missing, and the copy."""


def deletions(text: str) -> Iterator[Deletion]:
    """One for each part of a file of any kind that import reads."""
    if text.startswith("#!") or "\n#SBATCH" in text:
        yield from _of_sbatch(text)
    elif text.startswith("{"):
        yield from _of_json(text)
    else:
        for root in yaml.compose_all(text, yaml.SafeLoader):
            yield from _of_yaml(text, root, "")


def _of_json(text: str) -> Iterator[Deletion]:
    for path in _paths(json.loads(text)):
        copy = json.loads(text)
        holder = copy
        for part in path[:-1]:
            holder = holder[part]
        del holder[path[-1]]
        yield ".".join(map(str, path)), json.dumps(copy)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, below in items:
        yield (*path, name)
        yield from _paths(below, (*path, name))


def _of_yaml(text: str, node: yaml.Node, path: str) -> Iterator[Deletion]:
    start, end = node.start_mark.index, node.end_mark.index
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            at = f"{path}.{key.value}".lstrip(".")
            yield at, _without(text, key.start_mark.index, value, node.flow_style)
            yield from _of_yaml(text, value, at)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            first = item.start_mark.index
            first = first if node.flow_style else text.rindex("-", 0, first)
            yield f"{path}.{index}", _without(text, first, item, node.flow_style)
            yield from _of_yaml(text, item, f"{path}.{index}")
    elif isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        for match in re.compile(r"[^\n]*\S[^\n]*").finditer(text, text.index("\n", start) + 1, end):
            if not match[0].lstrip().startswith("#"):
                yield f"{path}: {match[0].strip()[:60]}", text[: match.start()] + text[match.end() :]


def _without(text: str, start: int, node: yaml.Node, flow: bool) -> str:
    end = node.start_mark.index + len(text[node.start_mark.index : node.end_mark.index].rstrip())
    if flow and (comma := re.match(r"\s*,", text[end:])):
        end += comma.end()
    return text[:start] + re.sub(r"[^\n]", "", text[start:end]) + text[end:]


def _of_sbatch(text: str) -> Iterator[Deletion]:
    for match in re.finditer(r"^#SBATCH[^\n]*", text, re.MULTILINE):
        yield match[0], text[: match.start()] + text[match.end() :]
        words = list(re.finditer(r"(?<=\s)-\S*(?:[ \t]+[^-\s#]\S*)?", match[0]))
        for word in words if len(words) > 1 else ():
            at = match.start()
            yield f"{match[0]}: {word[0]}", text[: at + word.start()] + text[at + word.end() :]
    yield from _of_shell(text)


def _of_shell(text: str) -> Iterator[Deletion]:
    """Each statement, and each word of a command or an array; a program that runs a script by its name is the same."""
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    raw = text.encode()
    root = Parser(Language(tree_sitter_bash.language())).parse(raw).root_node
    statements = statements_of(root)
    left = [root]
    while left:
        node = left.pop()
        left += reversed(node.children)
        parent = node.parent.type if node.parent is not None else ""
        if node.type in SIMPLE and parent not in ("command", "declaration_command") and node.start_byte in statements:
            put = b"" if parent in ("program", "variable_assignments") else b":"
        elif node.type in _WORDS and parent in ("command", "array"):
            put = b""
        else:
            continue
        if node.text == put:
            continue  # the copy would be the file itself
        kept = b"".join(re.findall(rb"\\?\n", raw[node.start_byte : node.end_byte]))
        copy = raw[: node.start_byte] + put + kept + raw[node.end_byte :]
        yield f"{node.start_point[0] + 1}: {node.type} {node.text.decode()[:70]!r}", copy.decode()
