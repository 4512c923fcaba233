"""What a shell script does, read by a parser of shell: variables, arrays, exports, and commands in order. Pure."""

from __future__ import annotations

import ast
import fnmatch
import operator
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.submit.imports.how import HOW
from hyperpod_ext.submit.imports.shell_parts import (
    assigned_in,
    branch,
    changed,
    end_of,
    heredoc,
    is_known,
    is_quick,
    number_of,
    path_printed,
    split_words,
)

_NAME = re.compile(r"[A-Za-z_]\w*")
_CLUSTER = "/opt/sagemaker_cluster"
_QUIET = {"set", "echo", ":", "true", "[", "wait"}
_MAKES = {"mkdir", "touch", "chmod", "ln", "cp", "mv", "rm"}
"""Commands that do the same wherever the first node runs them: no variables of the script change what they do."""
_EMPTY = r"\[\[?\s*(!?)\s*-([nz])\s+\"?\$\{?([A-Za-z_]\w*)(?::?-)?\}?\"?\s*\]\]?"
_QUOTED = "raw_string"
_OF_SLURM = r"\$\{?SLURM_\w+\}?"
"""Variables that a task has, too."""
_NUMERIC = {"-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le}
_NUMERIC |= {"-gt": operator.gt, "-ge": operator.ge}

_REMARK = re.compile(r"`#[^`\n]*`")
"""A remark between the words of a command; it comes to nothing."""
_RUNNERS = {"time", "exec", "nohup", "command", "nice", "ionice", "timeout", "stdbuf", "sudo"}
"""They start the command that follows, behind options and numbers of their own."""
_EXPANDED = re.compile(r"(?<!\\)[*?]|\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}|^~")
"""What the shell makes other words of: file names, lists, a home folder."""
_LONGEST = 100_000
"""Characters of a value; what the shell would do with a longer one is no job's business."""
_MOST_STATEMENTS = 20_000
"""Functions that call each other many times make as many of a few lines."""
_DEEPEST = 8
"""How deep functions that call each other are followed."""
_SIGNS = {"<": "-lt", "<=": "-le", ">": "-gt", ">=": "-ge", "==": "-eq", "!=": "-ne"}


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
    hidden: list[tuple[str, int]] = field(default_factory=list)
    """Steps in loops and the like, which are not followed."""
    folders: list[str | None] = field(default_factory=list)
    """Where each step is run, if the script has gone to a folder that is known."""
    alone: list[tuple[list[str], int]] = field(default_factory=list)
    """Commands among the others that start a Python file by no launcher."""
    in_background: set[int] = field(default_factory=set)
    """Lines of steps that others run beside."""
    literal: set[str] = field(default_factory=set)
    """Words of steps that this shell passes on as they are, in single quotes: what they start may expand them."""
    notes: list[tuple[str, int]] = field(default_factory=list)
    """What was settled here and may be otherwise when the job runs."""


Starts = Callable[[Sequence[str]], bool]
"""Whether these words are a command that starts workers."""


def is_step(words: Sequence[str]) -> bool:
    """Whether a command of an sbatch file starts workers: srun, or a launcher."""
    head = [word.rpartition("/")[2] for word in words]
    at = 0
    while at < len(head) and (head[at] in _RUNNERS or (at and re.fullmatch(r"-\S*|\d\S*", head[at]))):
        at += 1
    return head[at : at + 1] in (["srun"], ["torchrun"], ["accelerate"], ["deepspeed"], ["hyperpodrun"])


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
    text = _REMARK.sub(lambda remark: " " * len(remark[0]), text)
    root = Parser(Language(tree_sitter_bash.language())).parse(text.encode()).root_node
    reader = _Reader(starts)
    reader.values |= {name: [value] for name, value in (known or {}).items()}
    try:
        reader.walk(root)
    except RecursionError:
        raise ConfigError([Problem("the shell is nested too deep to be read", source=source)]) from None
    except _TooLongError:
        message = f"a value comes to more than {_LONGEST} characters, or what it runs to more than {_MOST_STATEMENTS}"
        raise ConfigError([Problem(message, source=source, line=reader.line)]) from None
    return reader.found


class _TooLongError(Exception):
    """A few lines would make more than a machine can hold: values that double, functions that call each other."""


class _Reader:
    def __init__(self, starts: Starts) -> None:
        self._starts = starts
        self.found = Script()
        self.values: dict[str, list[str]] = {}
        self.line = 1
        self._exports_all = False
        self._sets: str | None = None
        """The variable that is being assigned."""
        self.moved = False
        """Whether it has left the folder that it was submitted from."""
        self._statements = 0
        self._functions: dict[str, Any] = {}
        self._called: list[str] = []
        """Functions that are being followed, the innermost last."""
        self._arguments: list[str] | None = None
        """Those of the innermost function; None outside, where sbatch may be given some for the file."""

    def walk(self, node: Any) -> None:
        for child in node.named_children:
            self._statement(child)

    def _statement(self, node: Any) -> None:
        self._statements += 1
        if self._statements > _MOST_STATEMENTS:
            raise _TooLongError
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
            case "redirected_statement" if self._reads(text) is not None:
                return
            case "redirected_statement":
                before, steps = len(self.found.others), len(self.found.steps)
                self.walk(node)
                self.found.others[before:] = [(text, line)] * (len(self.found.others) > before)
                if len(self.found.steps) > steps:
                    self._redirected(node)
            case "pipeline":
                self._pipeline(node, line, text)
            case "list":
                self._list(node)
            case "case_statement":
                self._case(node, line, text)
            case "unset_command":
                self._unset(node, line, text)
            case "compound_statement" | "variable_assignments":
                self.walk(node)
            case "subshell":
                folder, moved = self.values.get("PWD"), self.moved
                self.walk(node)
                self._go_to(folder, moved)
            case "function_definition":
                self._define(node)
            case "test_command":
                return
            case _:
                self._not_followed(node, line, text)

    def _not_followed(self, node: Any, line: int, text: str) -> None:
        """A loop, a command: what it sets is not known from here on."""
        self.found.others.append((text, line))
        if node.type != "command" and self._has_step(node):
            self.found.hidden.append((text, line))
        for name in assigned_in(node):
            self.values.pop(name, None)
            self.found.exports.pop(name, None)

    def _reads(self, text: str) -> str | None:
        """The variable of `read -r -d '' NAME <<END`, which has the text that follows from here on."""
        match = re.match(r"read\s+(?:-\w+\s+)*-d\s*(?:''|\"\")\s+([A-Za-z_]\w*)\s", text)
        given = heredoc(text) if match else None
        if match is None or given is None:
            return None
        self.values[match[1]] = [self._expand(given[0]) if given[1] else given[0]]
        return match[1]

    def _define(self, node: Any) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self._functions[name.text.decode()] = body

    def _call(self, name: str, arguments: list[str]) -> None:
        """What a function does, as if its lines stood here."""
        before, self._arguments = self._arguments, arguments
        self._called.append(name)
        self._statement(self._functions[name])
        self._called.pop()
        self._arguments = before

    def _has_step(self, node: Any, depth: int = 0) -> bool:
        """Whether a step is somewhere in it, or in a function that it calls."""
        left = [node]
        while left:
            one = left.pop()
            if one.type == "command":
                words = [child.text.decode() for child in one.children if child.type != "variable_assignment"]
                body = self._functions.get(words[0]) if words else None
                if self._starts(words) or (body is not None and depth < _DEEPEST and self._has_step(body, depth + 1)):
                    return True
            left += one.named_children
        return False

    def _go_to(self, folder: list[str] | None, moved: bool) -> None:
        self.moved = moved
        if folder is None:
            self.values.pop("PWD", None)
        else:
            self.values["PWD"] = folder

    def _changes_folder(self, words: list[str]) -> bool:
        """Whether `cd` goes to a folder that is known; then later words are read from there."""
        if words[0] != "cd" or len(words) != 2 or re.search(r"[`*?~]", words[1]):
            return False
        if re.fullmatch(r"\$\{?SLURM_SUBMIT_DIR\}?", words[1]) and not self.moved:
            return True  # where it begins
        here = " ".join(self.values.get("PWD", []))
        if "$" in words[1] or not (words[1].startswith("/") or here.startswith("/")):
            return False
        folder = posixpath.normpath(posixpath.join(here, words[1]))
        self._go_to([folder], [folder] != self.values.get("SLURM_SUBMIT_DIR"))
        return True

    def _unset(self, node: Any, line: int, text: str) -> None:
        names = [child.text.decode() for child in node.named_children if child.type == "variable_name"]
        if not all(name in self.values for name in names):
            self.found.others.append((text, line))
        for name in names:
            self.values.pop(name, None)
            self.found.exports.pop(name, None)

    def _list(self, node: Any) -> bool:
        """`A && B`, `A || B`: whether it succeeds, as far as conditions are known; commands are taken to."""
        left, sign, right = node.children[0], node.children[1].type, node.children[2]
        text = left.text.decode()
        if left.type == "list":
            done = self._list(left)
            if done and sign == "||" and not left.children[-1].type.startswith("variable_assignment"):
                self._on_failure(right)
        elif not _is_condition(left):
            self._statement(left)
            done = True
            if sign == "||":
                self._on_failure(right)
        else:
            holds = self._holds(text)
            if holds is None and sign == "&&" and re.match(r"(source|\.)\s", right.text.decode()):
                words = [word for child in right.children if child.is_named for word in self._words(child)]
                self.found.others.append((f"{text} && {' '.join(words)}", node.start_point[0] + 1))
                return True
            done = holds if holds is not None else sign == "||" and "exit" in right.text.decode()
            if holds is None:
                self._assume(text, done, left.start_point[0] + 1)
        if done != (sign == "&&"):
            return done
        if right.type == "list":
            return self._list(right)
        self._statement(right)
        return True

    def _on_failure(self, right: Any) -> None:
        if not re.match(r"(exit|return|true|:|echo|\{|\()", right.text.decode()):
            what = f"|| {right.text.decode()[:80]}: is run where the command before it fails: not carried"
            self.found.notes.append((what, right.start_point[0] + 1))

    def _case(self, node: Any, line: int, text: str) -> None:
        """The first pattern that a known value matches."""
        value = node.child_by_field_name("value")
        words = self._words(value) if value is not None else []
        if len(words) != 1 or re.search(r"[$`]", words[0]):
            self._not_followed(node, line, text)
            return
        for item in (child for child in node.named_children if child.type == "case_item"):
            closed = next((at for at, child in enumerate(item.children) if child.type == ")"), 0)
            patterns = [child.text.decode().strip("\"'") for child in item.children[:closed] if child.is_named]
            if not all(is_quick(words[0], pattern) for pattern in patterns):
                self._not_followed(node, line, text)
                return
            if any(fnmatch.fnmatchcase(words[0], pattern) for pattern in patterns):
                for child in item.children[closed:]:
                    if child.is_named:
                        self._statement(child)
                return

    def _not_set(self, branch: Any, body: list[Any]) -> None:
        """A branch that may be run after all: what it would set."""
        names = sorted({name for statement in body for name in assigned_in(statement)})
        if names:
            text = f"{', '.join(names)}: set under a condition that is taken as no"
            self.found.notes.append((text, branch.start_point[0] + 1))

    def _assume(self, condition: str, yes: bool, line: int, body: Sequence[Any] = ()) -> None:
        shown = " ".join(condition.split())[:80]
        runs = [one.text.decode().partition("\n")[0] for one in body if one.type in ("command", "pipeline", "list")]
        runs = [one for one in runs if one.partition(" ")[0] not in (*_QUIET, "exit")]
        text = f"whether `{shown}` holds is not known here: taken as {'yes' if yes else 'no'}"
        self.found.notes.append((text + (f", so `{runs[0][:80]}` is not run" if runs else ""), line))

    def _command(self, node: Any, line: int, text: str) -> None:
        words = self._words_of(node)
        named = [child for child in node.named_children if child.type == "variable_assignment"]
        called = node.child_by_field_name("name")
        if called is not None and (
            apart := [one for one in named if _line_ends(node, one.end_byte, called.start_byte)]
        ):
            for one in apart:  # lines of their own, which the parser joins with the command after them
                self._statement(one)
            named = [one for one in named if one not in apart]
            first = (named or [called])[0]
            line, text = first.start_point[0] + 1, text.encode()[first.start_byte - node.start_byte :].decode()
            words = self._words_of(node)
            self.line = line
        if words[:1] == ["eval"] and not re.search(r"[;&|<>`]", re.sub(r"\$\([^()]*\)", "", " ".join(words))):
            words = split_words(" ".join(words[1:]))  # the words of a value, as a command
        given, words = variables_of_env(words)
        head = [word.rpartition("/")[2] for word in words]
        step = self._starts(words)
        if step:
            self.found.exports |= {name: (value, line) for name, value in given.items()}
            if node.next_sibling is not None and node.next_sibling.type == "&":
                self.found.in_background.add(line)
        for one in named:
            assigned = self._assign(one) if step or not words else None
            if step and assigned is not None:  # for this command alone
                self.found.exports[assigned] = (" ".join(self.values[assigned]), line)
        if step:
            self._expansions(node)
            self.found.steps.append((words, line))
            self.found.folders.append(" ".join(self.values["PWD"]) if self.moved and "PWD" in self.values else None)
        elif head and words[0] in self._functions and words[0] not in self._called and len(self._called) < _DEEPEST:
            self._call(words[0], words[1:])
        elif head and self._changes_folder(words):
            return
        elif head[:1] == ["set"] and ("errexit" in words or any(re.fullmatch(r"-[a-z]*e[a-z]*", w) for w in words)):
            self.found.strict = True
        elif head[:1] == ["set"] and (
            "allexport" in words or any(re.fullmatch(r"[-+][a-z]*a[a-z]*", w) for w in words)
        ):
            self._exports_all = not any(word.startswith("+") for word in words[1:])
        elif head and words[0] in _MAKES and not self.moved and not self.found.steps and is_known(words):
            self.found.prepare.append(words)
        elif not head or head[0] not in _QUIET:
            if head and re.fullmatch(r"python[0-9.]*", head[0]) and any(word.endswith(".py") for word in words):
                self.found.alone.append((words, line))
            if head[:1] in (["cd"], ["pushd"], ["popd"]):
                self._go_to(None, True)
            if head[:1] in (["source"], ["."]) and is_known(words):
                text = " ".join(words)  # with the values of its variables
                text = f"set -a; {text}; set +a" if self._exports_all else text
            self._not_followed(node, line, text)

    def _expansions(self, node: Any) -> None:
        """Words without quotes that the shell replaces by others, which a spec passes on as they are."""
        for child in node.named_children:
            parts = child.named_children if child.type == "concatenation" else [child]
            plain = "".join(one.text.decode() for one in parts if one.type in ("word", "brace_expression"))
            if child.type in ("word", "brace_expression", "concatenation") and _EXPANDED.search(plain):
                shown = child.text.decode()[:80]
                self._note(f"{shown}: the shell makes other words of it; the spec passes it as text")

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
        for one in (node, *clauses):
            head, body = branch(one)
            before = len(self.found.notes)
            holds = self._holds(head.text.decode()) if head is not None else True
            if head is not None and not holds and (holds is None or len(self.found.notes) > before):
                self._not_set(one, body)
            if holds is None and head is not None:
                self._assume(head.text.decode(), False, head.start_point[0] + 1, body)
            elif holds:
                for child in body:
                    self._statement(child)
                return

    def _holds(self, condition: str) -> bool | None:
        condition = condition.strip()
        if condition.startswith("!") and not re.search(r"&&|\|\|", condition):
            holds = self._holds(condition[1:])
            return None if holds is None else not holds
        if condition in self._functions:
            return self._holds(self._functions[condition].text.decode().strip("{}; \n\t"))
        if condition.startswith("test "):
            condition = f"[ {condition[5:]} ]"
        if "&&" in condition or "||" in condition:
            parts = re.split(r"&&|\|\|", condition)
            if len(inner := re.split(r"&&|\|\|", condition.removeprefix("[[").removesuffix("]]"))) > 1 and (
                condition.startswith("[[") and "]]" not in condition[:-2]
            ):
                parts = [f"[[ {part.strip()} ]]" for part in inner]
            both = [self._holds(part) for part in parts]
            known = all(one is not None for one in both)
            return (all(both) if "&&" in condition else any(both)) if known else None
        if _CLUSTER in condition:
            return not re.search(r"\[\s*!", condition)
        if match := re.fullmatch(r"\[\[?\s*(!?)\s*-v\s+([A-Za-z_]\w*)\s*\]\]?", condition):
            condition = f'[ {match[1]} -n "${match[2]}" ]'
        match = re.fullmatch(_EMPTY, condition)
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
        """`[ A -le B ]`, `[ A = B ]` or `(( A < B ))` of two values that are known."""
        if numbers := re.fullmatch(r"\(\(\s*(\w+|\$\{?\w+\}?)\s*([<>=!]=|[<>])\s*(\w+|\$\{?\w+\}?)\s*\)\)", condition):
            left, right = (one if re.match(r"[$\d]", one) else f"${one}" for one in (numbers[1], numbers[3]))
            condition = f"[ {left} {_SIGNS[numbers[2]]} {right} ]"
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
        self._sets = name
        if value is not None:
            children = value.named_children if value.type == "array" else [value]
            words = [word for child in children for word in self._words(child)] or (
                [] if value.type == "array" else [""]
            )
        self._sets = None
        more = any(child.type == "+=" for child in node.children)
        self.values[name] = (self.values.get(name, []) if more else []) + words
        if sum(map(len, self.values[name])) > _LONGEST:
            raise _TooLongError
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
                inner = text[1:-1].replace("\\\n", "")
                if every := re.fullmatch(r"\$@|\$\{@(?::(\d+))?\}", inner):
                    return self._given(int(every[1] or 1))
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
            case "command_substitution":
                known = self._printed(text[1:-1] if text[0] == "`" else text[2:-1])
                return [text] if known is None else split_words(known)
            case "arithmetic_expansion":
                return [self._expand(text)]
            case "simple_expansion" if text in ("$@", "$*"):
                return self._given()
            case "simple_expansion" | "expansion":
                if array := re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", text):
                    return self._array(array[1])
                return split_words(self._expand(text))
        return [self._expand(text).replace("\\", "") if "$(" not in text else text]

    def _given(self, first: int = 1) -> list[str]:
        """`$@`, `${@:2}`: the arguments of the function, or of the file."""
        if self._arguments is None:
            self._note("$@: arguments that sbatch is given for the file: taken as none")
        return list(self._arguments or [])[max(first - 1, 0) :]

    def _argument(self, name: str) -> str:
        """`$1`: an argument of the function, or of the file."""
        if self._arguments is not None:
            return self._arguments[int(name) - 1] if int(name) <= len(self._arguments) else ""
        self._note(f"${name}: an argument that sbatch is given for the file: taken as empty ({HOW.format(name=name)})")
        return ""

    def _note(self, text: str) -> None:
        """Once, where a value is used that nothing in the file gives."""
        if not any(text == other for other, _line in self.found.notes):
            self.found.notes.append((text, self.line))

    def _words_of(self, command: Any) -> list[str]:
        """Words of a command; the parser takes `$A/$1` for two, and nothing is between them."""
        found: list[str] = []
        children = [child for child in command.children if child.is_named and not child.type.endswith("redirect")]
        at = 0
        while at < len(children):
            first = last = children[at]
            while at + 1 < len(children) and children[at + 1].start_byte == last.end_byte:
                at, last = at + 1, children[at + 1]
            at += 1
            text = command.text[first.start_byte - command.start_byte : last.end_byte - command.start_byte].decode()
            joined = first is not last and first.type != "variable_assignment"
            found += split_words(self._expand(text)) if joined else self._words(first)
        return found

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
            end = end_of(text, at)
            found += self._value(text[at:end])
            at = end
        return found

    def _value(self, part: str) -> str:
        if part.startswith("$(("):
            return self._worked_out(part)
        if part.startswith("$("):
            known = self._printed(part[2:-1])
            return part if known is None else known
        match = re.fullmatch(r"\$(?:\{(\w+)(?:(:?[-=])(.*))?\}|(\w+))", part, re.DOTALL)
        if match is None:
            known = self._changed(part) if part.startswith("${") else None
            return part if known is None else known
        name = match[1] or match[4]
        if name in self.values and (self.values[name] != [""] or not (match[2] or "").startswith(":")):
            return " ".join(self.values[name])
        if name.isdecimal() and int(name) and name not in self.values and (match[2] is None or self._arguments):
            return self._argument(name)
        if match[2] is None:
            return "" if name in self.values else part
        if name == self._sets and name.endswith("PATH") and "=" not in match[2]:
            return part  # the nodes have one of their own
        default = self._expand(match[3]).strip("\"'")
        self.found.notes.append((f"{name}: its default {default!r} is taken", self.line))
        if "=" in match[2]:
            self.values[name] = [default]
        return default

    def _printed(self, command: str) -> str | None:
        """What a command in `$(...)` prints, where that is known: a path, or a word under a condition."""
        if (printed := re.fullmatch(r"\s*(\[.*\])\s*&&\s*echo\s+([^;|&]*)", command, re.DOTALL)) is not None:
            holds = self._holds(printed[1])
            return None if holds is None else self._expand(printed[2].strip().strip("\"'")) if holds else ""
        if command.lstrip().startswith("cat") and (given := heredoc(command)) is not None:
            return self._expand(given[0]) if given[1] else given[0]
        if not re.match(r"\s*(pwd|dirname|basename|cd)\b", command):
            return None
        words = [self._expand(word.strip("\"'")) for word in command.split()]
        known = not any(re.search(r"[$`*?~]", word) for word in words)
        return path_printed(words, " ".join(self.values.get("PWD", []))) if known else None

    def _changed(self, part: str) -> str | None:
        """`${A##*/}`, `${#A}`, `${A[1]}` of values that are known."""
        match = re.fullmatch(r"\$\{(#?)([A-Za-z_]\w*)(?:\[([^\]]*)\])?(.*)\}", part, re.DOTALL)
        values = self.values.get(match[2]) if match else None
        if match is None or values is None or not all(is_known([one]) for one in values):
            return None
        value = " ".join(values)
        if match[3] is not None:
            at = self._expand(match[3])
            if not at.isdecimal() or match[1] or int(at) >= len(values):
                return str(len(values)) if match[1] and at in ("@", "*") and not match[4] else None
            value = values[int(at)]
        if match[1]:
            return None if match[4] else str(len(value))
        return changed(value, self._expand(match[4])) if match[4] else value

    def _worked_out(self, part: str) -> str:
        """`$((2 * NODES))`, if all of it is known; else as it is written."""
        inner = part.removeprefix("$((").removesuffix("))")
        filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: " ".join(self.values.get(match[1], ["?"])), inner)
        if not re.fullmatch(r"[\d\s()*/%+-]{1,200}", filled):
            return part
        try:
            found = number_of(ast.parse(filled.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return part
        return str(found)


def _is_condition(node: Any) -> bool:
    text = node.text.decode()
    return node.type in ("test_command", "negated_command") or text.startswith(("test ", "[ "))


def variables_of_env(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """What `env A=1 COMMAND` sets, and the command."""
    given: dict[str, str] = {}
    if words[:1] != ["env"]:
        return given, words
    at = 1
    while at < len(words) and (match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[at], re.DOTALL)):
        given[match[1]] = match[2]
        at += 1
    return (given, words[at:]) if words[at:] else ({}, words)


def _line_ends(node: Any, start: int, end: int) -> bool:
    """Whether a line ends between two places in a command: a backslash before its end joins it with the next."""
    between = node.text[start - node.start_byte : end - node.start_byte].decode()
    return re.search(r"(?<!\\)\n", between) is not None
