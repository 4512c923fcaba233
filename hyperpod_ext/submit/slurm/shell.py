"""What an sbatch file does, read by a parser of shell: variables, arrays, exports, and commands in order. Pure."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.submit.imports.placeholders import HOW

_NAME = re.compile(r"[A-Za-z_]\w*")
_CLUSTER = "/opt/sagemaker_cluster"
_QUIET = {"set", "echo", ":", "true", "["}
_MAKES = {"mkdir", "touch", "chmod", "ln", "cp", "mv", "rm"}
"""Commands that do the same wherever the first node runs them: no variables of the script change what they do."""
_NUMERIC = {"-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le}
_NUMERIC |= {"-gt": operator.gt, "-ge": operator.ge}


@dataclass
class Script:
    """What was found; lines are counted from 1."""

    exports: dict[str, tuple[str, int]] = field(default_factory=dict)
    steps: list[tuple[list[str], int]] = field(default_factory=list)
    """Words of the commands that start workers: srun, or a launcher."""
    others: list[tuple[str, int]] = field(default_factory=list)
    """Everything else that is run."""
    prepare: list[list[str]] = field(default_factory=list)
    """Commands before the first step that make folders and files, whose words are all known."""
    strict: bool = False
    """Whether a command that fails ends the script, `set -e`."""
    notes: list[tuple[str, int]] = field(default_factory=list)
    """What was settled here and may be otherwise when the job runs."""


def read_script(text: str, source: str, known: Mapping[str, str] | None = None) -> Script:
    """What `text` does, where variables have the values of `known` before it begins.

    Raises:
        ConfigError: the parser is not installed.
    """
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
    reader.values |= {name: [value] for name, value in (known or {}).items()}
    reader.walk(root)
    return reader.found


class _Reader:
    def __init__(self) -> None:
        self.found = Script()
        self.values: dict[str, list[str]] = {}
        self.line = 1
        self.moved = False
        """Whether it has left the folder that it was submitted from."""

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
        elif head[:1] == ["set"] and any(re.fullmatch(r"-[a-z]*e[a-z]*", word) for word in words):
            self.found.strict = True
        elif head and words[0] in _MAKES and not self.moved and not self.found.steps and _is_known(words):
            self.found.prepare.append(words)
        elif not head or head[0] not in _QUIET:
            self.moved |= head[:1] in (["cd"], ["pushd"])
            self.found.others.append((text, line))

    def _if(self, node: Any, line: int) -> None:
        """The first branch whose condition holds; an else where none does."""
        clauses = [child for child in node.children if child.type in ("elif_clause", "else_clause")]
        for branch in (node, *clauses):
            head, body = _branch(branch)
            holds = self._holds(head.text.decode()) if head is not None else True
            if holds is None and head is not None:
                condition = head.text.decode()[:80]
                where = head.start_point[0] + 1
                self.found.notes.append((f"whether `{condition}` holds is not known here: taken as no", where))
            elif holds:
                for child in body:
                    self._statement(child)
                return

    def _holds(self, condition: str) -> bool | None:
        if "&&" in condition or "||" in condition:
            both = [self._holds(part) for part in re.split(r"&&|\|\|", condition)]
            known = all(one is not None for one in both)
            return (all(both) if "&&" in condition else any(both)) if known else None
        if _CLUSTER in condition:
            return not re.search(r"\[\s*!", condition)
        match = re.search(r"\[\[?\s*(!?)\s*-([nz])\s+\"?\$\{?([A-Za-z_]\w*)(?::-)?\}?\"?\s*\]", condition)
        if match is None:
            return self._compared(condition)
        if match[3] not in self.values and match[3].startswith("SLURM"):
            return (match[2] == "n") != bool(match[1])  # Slurm sets them
        if match[3] not in self.values:
            how = HOW.format(name=match[3])
            self.found.notes.append((f"{match[3]}: nothing in the file sets it: taken as empty ({how})", self.line))
        empty = not " ".join(self.values.get(match[3], []))
        return (empty == (match[2] == "z")) != bool(match[1])

    def _compared(self, condition: str) -> bool | None:
        """`[ A -le B ]` or `[ A = B ]` of two values that are known."""
        match = re.fullmatch(r"\[\[?\s+(\S+)\s+(-\w\w|==?|!=)\s+(\S+)\s+\]\]?", condition.strip())
        if match is None or re.search(r"\$\{?\d", condition):
            return None  # arguments that sbatch may be given for the file
        left, right = (self._expand(match[at].strip("\"'")) for at in (1, 3))
        if re.search(r"[$`*?\[]", left + right):
            return None
        if match[2] in ("=", "==", "!="):
            return (left == right) == (match[2] != "!=")
        if match[2] not in _NUMERIC or not (re.fullmatch(r"-?\d+", left) and re.fullmatch(r"-?\d+", right)):
            return None
        return bool(_NUMERIC[match[2]](int(left), int(right)))

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
                    return self._array(array[1])
                return [self._expand(inner).replace('\\"', '"')]
            case "concatenation":
                return ["".join(" ".join(self._words(child)) for child in node.children)]
            case "command_name":
                return [word for child in node.children for word in self._words(child)]
            case "simple_expansion" | "expansion":
                if array := re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", text):
                    return self._array(array[1])
                found = self._expand(text)
                return [found] if "$(" in found or "`" in found else found.split()
        return [self._expand(text).replace("\\", "") if "$(" not in text else text]

    def _array(self, name: str) -> list[str]:
        """One that nothing has set is empty: arrays do not come from the environment."""
        if name not in self.values and any(re.search(rf"\b{name}\b", other) for other, _line in self.found.others):
            return [f"${{{name}[@]}}"]  # set by what is not followed here: a loop, mapfile
        return list(self.values.get(name, []))

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


def _is_known(words: list[str]) -> bool:
    """Whether the shell would find nothing in them that it replaces."""
    return not any(re.search(r"[$`*?\[\]{}~\n\r\x00]", word) for word in words)


def _branch(node: Any) -> tuple[Any | None, list[Any]]:
    """Condition of an if, an elif or an else, and its statements."""
    conditions: list[Any] = []
    body: list[Any] = []
    past = node.type == "else_clause"
    for child in node.children:
        if child.type == "then":
            past = True
        elif child.is_named and child.type not in ("elif_clause", "else_clause", "comment"):
            (body if past else conditions).append(child)
    return (conditions[0] if conditions else None), body


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
