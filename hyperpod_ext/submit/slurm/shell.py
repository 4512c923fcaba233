"""What an sbatch file does, read by a parser of shell: variables, arrays, exports, and commands in order. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.errors import ConfigError, Problem

_NAME = re.compile(r"[A-Za-z_]\w*")
_CLUSTER = "/opt/sagemaker_cluster"
_QUIET = {"set", "echo", ":", "true", "["}


@dataclass
class Script:
    """What was found; lines are counted from 1."""

    exports: dict[str, tuple[str, int]] = field(default_factory=dict)
    steps: list[tuple[list[str], int]] = field(default_factory=list)
    """Words of the commands that start workers: srun, or a launcher."""
    others: list[tuple[str, int]] = field(default_factory=list)
    """Everything else that is run."""
    notes: list[tuple[str, int]] = field(default_factory=list)
    """What was settled here and may be otherwise when the job runs."""


def read_script(text: str, source: str) -> Script:
    """Raises ConfigError where the parser is not installed."""
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ImportError:
        hint = "pip install tree-sitter tree-sitter-bash"
        raise ConfigError(
            [Problem("sbatch files are read with a parser that is missing", source=source, hint=hint)]
        ) from None
    root = Parser(Language(tree_sitter_bash.language())).parse(text.encode()).root_node
    reader = _Reader()
    reader.walk(root)
    return reader.found


class _Reader:
    def __init__(self) -> None:
        self.found = Script()
        self.values: dict[str, list[str]] = {}
        self.line = 1

    def walk(self, node: Any) -> None:
        for child in node.named_children:
            self._statement(child)

    def _statement(self, node: Any) -> None:
        line, text = node.start_point[0] + 1, node.text.decode()
        self.line = line
        match node.type:
            case "comment" | "heredoc_redirect" | "file_redirect":
                return
            case "variable_assignment":
                self._assign(node)
            case "declaration_command":
                for child in node.named_children:
                    if child.type == "variable_assignment":
                        name = self._assign(child)
                        if text.startswith("export") and name is not None:
                            self.found.exports[name] = (" ".join(self.values[name]), line)
                    elif child.type == "variable_name" and text.startswith("export"):
                        known = self.values.get(child.text.decode())
                        if known is not None:
                            self.found.exports[child.text.decode()] = (" ".join(known), line)
            case "command":
                self._command(node, line, text)
            case "if_statement":
                self._if(node, line)
            case "redirected_statement":
                before = len(self.found.others)
                self.walk(node)
                self.found.others[before:] = [(text, line)] * (len(self.found.others) > before)
            case "list" | "compound_statement" | "variable_assignments":
                self.walk(node)
            case "test_command":
                return
            case _:
                self.found.others.append((text, line))

    def _command(self, node: Any, line: int, text: str) -> None:
        words = [word for child in node.children if child.is_named for word in self._words(child)]
        named = [child for child in node.named_children if child.type == "variable_assignment"]
        for one in named:
            self._assign(one)
        head = [word.rpartition("/")[2] for word in words]
        if "srun" in head[:2] or (head and head[0] in ("torchrun", "accelerate", "deepspeed", "hyperpodrun")):
            self.found.steps.append((words, line))
        elif not head or head[0] not in _QUIET:
            self.found.others.append((text, line))

    def _if(self, node: Any, line: int) -> None:
        condition = node.child_by_field_name("condition")
        holds = self._holds(condition.text.decode())
        if holds is None:
            self.found.notes.append(
                (f"whether `{condition.text.decode()[:80]}` holds is not known here: taken as no", line)
            )
        past = False
        for child in node.children:
            if child.type == "then":
                past = True
            elif child.type in ("else_clause", "elif_clause"):
                if not holds and child.type == "else_clause":
                    self.walk(child)
                elif not holds:
                    self.found.others.append((child.text.decode(), child.start_point[0] + 1))
            elif past and holds and child.is_named:
                self._statement(child)

    def _holds(self, condition: str) -> bool | None:
        if "&&" in condition or "||" in condition:
            both = [self._holds(part) for part in re.split(r"&&|\|\|", condition)]
            known = all(one is not None for one in both)
            return (all(both) if "&&" in condition else any(both)) if known else None
        if _CLUSTER in condition:
            return True
        match = re.search(r"\[\[?\s*(!?)\s*-([nz])\s+\"?\$\{?([A-Za-z_]\w*)(?::-)?\}?\"?\s*\]", condition)
        if match is None:
            return None
        if match[3].startswith("SLURM"):
            return (match[2] == "n") != bool(match[1])  # Slurm sets them
        empty = not " ".join(self.values.get(match[3], []))
        return (empty == (match[2] == "z")) != bool(match[1])

    def _assign(self, node: Any) -> str | None:
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        name = str(target.text.decode())
        if not _NAME.fullmatch(name):
            return None
        words: list[str] = []
        if value is not None:
            children = value.named_children if value.type == "array" else [value]
            words = [word for child in children for word in self._words(child)] or (
                [] if value.type == "array" else [""]
            )
        more = any(child.type == "+=" for child in node.children)
        self.values[name] = (self.values.get(name, []) if more else []) + words
        return name

    def _words(self, node: Any) -> list[str]:
        text = node.text.decode()
        match node.type:
            case "comment" | "heredoc_redirect" | "file_redirect" | "variable_assignment":
                return []
            case "raw_string":
                return [text[1:-1]]
            case "string":
                inner = text[1:-1]
                if array := re.fullmatch(r"\$\{(\w+)\[@\]\}", inner):
                    return list(self.values.get(array[1], [inner]))
                return [self._expand(inner).replace('\\"', '"')]
            case "concatenation":
                return ["".join(" ".join(self._words(child)) for child in node.children)]
            case "command_name":
                return [word for child in node.children for word in self._words(child)]
            case "simple_expansion" | "expansion":
                if (array := re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", text)) and array[1] in self.values:
                    return list(self.values[array[1]])
                return self._expand(text).split()
        return [self._expand(text).replace("\\", "") if "$(" not in text else text]

    def _expand(self, text: str) -> str:
        """Variables with a known value, and defaults; the rest stays as it is written."""
        found, at = "", 0
        while at < len(text):
            if text[at] != "$" or (at and text[at - 1] == "\\"):
                found += text[at]
                at += 1
                continue
            end = _end_of(text, at)
            found += self._value(text[at:end])
            at = end
        return found

    def _value(self, part: str) -> str:
        match = re.fullmatch(r"\$(?:\{(\w+)(?:(:?[-=])(.*))?\}|(\w+))", part, re.DOTALL)
        if match is None:
            return part
        name = match[1] or match[4]
        if name in self.values and (self.values[name] != [""] or not (match[2] or "").startswith(":")):
            return " ".join(self.values[name])
        if match[2] is None:
            return "" if name in self.values or name.isdecimal() else part
        default = self._expand(match[3]).strip("\"'")
        self.found.notes.append((f"{name}: its default {default!r} is taken", self.line))
        if "=" in match[2]:
            self.values[name] = [default]
        return default


def _end_of(text: str, at: int) -> int:
    """Where the expansion that begins at `at` ends."""
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
