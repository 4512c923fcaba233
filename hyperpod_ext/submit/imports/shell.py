"""What a shell script does, read by a parser of shell: variables, arrays, exports, and commands in order. Pure."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.submit.imports.placeholders import HOW

_NAME = re.compile(r"[A-Za-z_]\w*")
_CLUSTER = "/opt/sagemaker_cluster"
_QUIET = {"set", "echo", ":", "true", "["}
_MAKES = {"mkdir", "touch", "chmod", "ln", "cp", "mv", "rm"}
"""Commands that do the same wherever the first node runs them: no variables of the script change what they do."""
_QUOTED = "raw_string"
_OF_SLURM = r"\$\{?SLURM_\w+\}?"
"""Variables that a task has, too."""
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
    literal: set[str] = field(default_factory=set)
    """Words of steps that this shell passes on as they are, in single quotes: what they start may expand them."""
    notes: list[tuple[str, int]] = field(default_factory=list)
    """What was settled here and may be otherwise when the job runs."""


Starts = Callable[[Sequence[str]], bool]
"""Whether these words are a command that starts workers."""


def is_step(words: Sequence[str]) -> bool:
    """Whether a command of an sbatch file starts workers: srun, or a launcher."""
    head = [word.rpartition("/")[2] for word in words]
    return "srun" in head[:2] or (bool(head) and head[0] in ("torchrun", "accelerate", "deepspeed", "hyperpodrun"))


def read_script(text: str, source: str, known: Mapping[str, str] | None = None, starts: Starts = is_step) -> Script:
    """What `text` does, where variables have the values of `known` before it begins.

    Raises:
        ConfigError: the parser is not installed.
    """
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ImportError:
        hint = "pip install tree-sitter tree-sitter-bash"
        raise ConfigError([Problem("shell is read with a parser that is missing", source=source, hint=hint)]) from None
    root = Parser(Language(tree_sitter_bash.language())).parse(text.encode()).root_node
    reader = _Reader(starts)
    reader.values |= {name: [value] for name, value in (known or {}).items()}
    reader.walk(root)
    return reader.found


class _Reader:
    def __init__(self, starts: Starts) -> None:
        self._starts = starts
        self.found = Script()
        self.values: dict[str, list[str]] = {}
        self.line = 1
        self._exports_all = False
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
                name = self._assign(node)
                if self._exports_all and name is not None:
                    self.found.exports[name] = (" ".join(self.values[name]), line)
            case "declaration_command":
                exported = re.match(r"export\b|(declare|typeset)\s+-\w*x", text) is not None
                for child in node.named_children:
                    if child.type == "variable_assignment":
                        name = self._assign(child)
                        if exported and name is not None:
                            self.found.exports[name] = (" ".join(self.values[name]), line)
                    elif child.type == "variable_name" and exported:
                        known = self.values.get(child.text.decode())
                        if known is not None:
                            self.found.exports[child.text.decode()] = (" ".join(known), line)
            case "command":
                self._command(node, line, text)
            case "if_statement":
                self._if(node, line)
            case "redirected_statement":
                before, steps = len(self.found.others), len(self.found.steps)
                self.walk(node)
                self.found.others[before:] = [(text, line)] * (len(self.found.others) > before)
                if len(self.found.steps) > steps:
                    self._redirected(node)
            case "pipeline":
                self._pipeline(node, line, text)
            case "list" | "compound_statement" | "variable_assignments" | "subshell":
                self.walk(node)
            case "test_command":
                return
            case _:
                self.found.others.append((text, line))

    def _command(self, node: Any, line: int, text: str) -> None:
        words = [word for child in node.children if child.is_named for word in self._words(child)]
        named = [child for child in node.named_children if child.type == "variable_assignment"]
        head = [word.rpartition("/")[2] for word in words]
        step = self._starts(words)
        for one in named:
            name = self._assign(one) if step or not words else None
            if step and name is not None:  # for this command alone
                self.found.exports[name] = (" ".join(self.values[name]), line)
        if step:
            self.found.steps.append((words, line))
        elif head[:1] == ["set"] and any(re.fullmatch(r"-[a-z]*e[a-z]*", word) for word in words):
            self.found.strict = True
        elif head[:1] == ["set"] and any(re.fullmatch(r"[-+][a-z]*a[a-z]*", word) for word in words):
            self._exports_all = not any(word.startswith("+") for word in words[1:])
        elif head and words[0] in _MAKES and not self.moved and not self.found.steps and _is_known(words):
            self.found.prepare.append(words)
        elif not head or head[0] not in _QUIET:
            self.moved |= head[:1] in (["cd"], ["pushd"])
            self.found.others.append((text, line))

    def _redirected(self, node: Any) -> None:
        for child in node.named_children:
            if child.type.endswith("redirect") and child.text.decode().strip() not in ("2>&1", "1>&2"):
                what = (child.text.decode().strip().splitlines() or [""])[0]
                self.found.notes.append((f"{what}: what workers print is kept by the target, not there", self.line))

    def _pipeline(self, node: Any, line: int, text: str) -> None:
        """A step whose output another command reads, such as `tee`."""
        first, *rest = node.named_children
        steps, others = len(self.found.steps), len(self.found.others)
        self._statement(first)
        if len(self.found.steps) == steps:
            self.found.others[others:] = [(text, line)]
            return
        for one in rest:
            what = f"| {one.text.decode().strip()[:100]}"
            self.found.notes.append((f"{what}: what workers print is kept by the target, not given to it", line))

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
                self.found.literal.add(text[1:-1])
                return [text[1:-1]]
            case "string":
                inner = text[1:-1]
                if array := re.fullmatch(r"\$\{(\w+)\[@\]\}", inner):
                    return self._array(array[1])
                return [self._expand(inner).replace('\\"', '"')]
            case "concatenation":
                parts = [(child.type, " ".join(self._words(child))) for child in node.children]
                word = "".join(part for _type, part in parts)
                if not any(re.search(r"[$`]", re.sub(_OF_SLURM, "", part)) for kind, part in parts if kind != _QUOTED):
                    self.found.literal.add(word)
                return [word]
            case "command_name":
                return [word for child in node.children for word in self._words(child)]
            case "arithmetic_expansion":
                return [self._expand(text)]
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
        if part.startswith("$(("):
            return self._worked_out(part)
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

    def _worked_out(self, part: str) -> str:
        """`$((2 * NODES))`, if all of it is known; else as it is written."""
        inner = part.removeprefix("$((").removesuffix("))")
        filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: " ".join(self.values.get(match[1], ["?"])), inner)
        if not re.fullmatch(r"[\d\s()*/%+-]{1,200}", filled):
            return part
        try:
            found = _number_of(ast.parse(filled.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return part
        return str(found)


_OPERATORS: dict[type, Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub}
_OPERATORS |= {ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod}


def _number_of(node: ast.expr) -> int:
    """What an expression of whole numbers comes to; those of a script that trains are small, and none is negative."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        found = _OPERATORS[type(node.op)](_number_of(node.left), _number_of(node.right))
        if 0 <= found < 2**63:
            return found
    raise ValueError("no number that is worked out here")


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
