"""Static analysis of a shell script, which is not run: variables, arrays, exports, and commands in order. Pure.

The reader follows the script statement by statement, with the known values of variables. A *step* is a command that
starts workers.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.jobs.imports.shell_parts import (
    assigned_in,
    branch,
    heredoc,
    is_known,
    is_quick,
    lines_apart,
    rest_of,
    split_words,
    statements_of,
)
from hyperpod_ext.jobs.imports.shell_values import LONGEST, Script, TooLongError, Values

_QUIET = {"set", "echo", ":", "true", "[", "wait"}
_MAKES = {"mkdir", "touch", "chmod", "ln", "cp", "mv", "rm"}
"""Commands that prepare files and folders, and whose effect does not depend on environment variables."""

_ENVIRONMENT = {"source", ".", "conda", "mamba", "micromamba", "module", "ml", "spack", "pyenv"}
"""Commands that change the environment of later commands."""
_REMARK = re.compile(r"`#[^`\n]*`")
"""Pattern of a comment in backticks, which the shell expands to nothing, between the words of a command."""
_RUNNERS = {"time", "exec", "nohup", "command", "nice", "ionice", "timeout", "stdbuf", "sudo"}
"""Commands that start another command after their own options and numbers."""
_EXPANDED = re.compile(r"(?<!\\)[*?]|\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}|^~")
"""Pattern of words that the shell expands: file names with `*` or `?`, lists in braces, and `~`."""
_MOST_STATEMENTS = 20_000
"""Maximum number of statements that the reader follows. Without this limit, nested calls of functions could run too
long."""
_DEEPEST = 8
"""Maximum nesting of function calls that the reader follows."""


Starts = Callable[[Sequence[str]], bool]
"""Function that returns whether the words of a command start workers."""


def is_step(words: Sequence[str]) -> bool:
    """Return whether a command of an sbatch file is srun or a launcher, and so starts workers."""
    head = [word.rpartition("/")[2] for word in words]
    at = 0
    while at < len(head) and (head[at] in _RUNNERS or (at and re.fullmatch(r"-\S*|\d\S*", head[at]))):
        at += 1
    return head[at : at + 1] in (["srun"], ["torchrun"], ["accelerate"], ["deepspeed"], ["hyperpodrun"])


def read_script(text: str, source: str, known: Mapping[str, str] | None = None, starts: Starts = is_step) -> Script:
    """Return the findings in the script `text`.

    Args:
        source: name of the file for messages.
        known: initial variables of the script.
        starts: returns whether the words of a command start workers.

    Raises:
        ConfigError: the parser is not installed, or the script is nested too deeply or runs too long to be read.
    """
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ImportError:
        hint = "pip install tree-sitter tree-sitter-bash"
        raise ConfigError(
            [Problem("the parser of shell scripts, tree-sitter, is not installed", source=source, hint=hint)]
        ) from None
    text = _REMARK.sub(lambda remark: " " * len(remark[0]), text)
    root = Parser(Language(tree_sitter_bash.language())).parse(text.encode()).root_node
    reader = _Reader(starts)
    reader.found.statements = statements_of(root)
    reader.values |= {name: [value] for name, value in (known or {}).items()}
    try:
        reader.walk(root)
    except RecursionError:
        wrong = "the shell script is nested too deeply to be read"
        raise ConfigError([Problem(wrong, source=source, hint="write a spec by hand")]) from None
    except TooLongError:
        message = f"a value has over {LONGEST} characters, or the script runs over {_MOST_STATEMENTS} statements, too "
        message += "many for import"
        hint = "shorten the script, or write a spec by hand"
        raise ConfigError([Problem(message, source=source, line=reader.line, hint=hint)]) from None
    return reader.ended()


class _Reader(Values):
    def __init__(self, starts: Starts) -> None:
        super().__init__()
        self._starts = starts
        self._exports_all = False
        self.moved = False
        """Whether the script has changed to another folder than the folder from which it was submitted."""
        self._statements = 0
        self._called: list[str] = []
        """Names of the functions whose bodies the reader is following, the innermost last."""
        self._exported_by: dict[str, set[int]] = {}

    def walk(self, node: Any) -> None:
        for child in node.named_children:
            self._statement(child)

    def ended(self) -> Script:
        """Return the findings of the whole script."""
        self.found.assigned |= self._made_by.keys()
        self.found.used.update(*(self._exported_by[name] for name in self.found.exports))
        return self.found

    def _statement(self, node: Any) -> None:
        self._statements += 1
        if self._statements > _MOST_STATEMENTS:
            raise TooLongError
        line, text = node.start_point[0] + 1, node.text.decode()
        self.line = line
        outside, self.values.read, self.at = (self.values.read, self.at), set(), node.start_byte
        self._of_type(node, line, text)
        self.values.read, self.at = outside

    def _of_type(self, node: Any, line: int, text: str) -> None:
        match node.type:
            case "comment" | "heredoc_redirect" | "file_redirect":
                return
            case "variable_assignment":
                name = self._assign(node)
                if self._exports_all and name is not None:
                    self._export(name, line)
            case "declaration_command":
                exported = re.match(r"export\b|(declare|typeset)\s+-\w*x", text) is not None
                for child in node.named_children:
                    if child.type == "variable_assignment":
                        name = self._assign(child)
                        if exported and name is not None:
                            self._export(name, line)
                    elif child.type == "variable_name" and exported and child.text.decode() in self.values:
                        self._export(child.text.decode(), line)
            case "command":
                self._command(node, line, text)
            case "if_statement":
                self._if(node, line)
            case "redirected_statement" if self._reads(text) is not None:
                return
            case "redirected_statement":
                before, steps = len(self.found.others), len(self.found.steps)
                self.walk(node)
                if len(self.found.others) > before:
                    body = node.children[0]
                    if body.type == "command":
                        text = self.found.others[before][0] + text.removeprefix(body.text.decode())
                    self.found.others[before:] = [(text, line)]
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

    def _export(self, name: str, line: int) -> None:
        self.found.exports[name] = (" ".join(self.values[name]), line)
        self._exported_by[name] = self._sources() | self._made_by.get(name, set())

    def _not_followed(self, node: Any, line: int, text: str) -> None:
        """Record a loop or command that the reader does not follow, and forget the values of variables set in it."""
        self.found.others.append((text, line))
        self.found.used.add(self.at)  # `others` has the statement's text, so findings depend on it
        if node.type != "command" and self._has_step(node):
            self.found.hidden.append((text, line))
        for name in assigned_in(node):
            self.found.assigned.add(name)
            self.values.pop(name, None)
            self.found.exports.pop(name, None)

    def _reads(self, text: str) -> str | None:
        """Assign the here-document of `read -r -d '' NAME <<END` to its variable.

        Returns the variable's name; None if `text` is another command.
        """
        match = re.match(r"read\s+(?:-\w+\s+)*-d\s*(?:''|\"\")\s+([A-Za-z_]\w*)\s", text)
        given = heredoc(text) if match else None
        if match is None or given is None:
            return None
        self.values[match[1]] = [self._expand(given[0]) if given[1] else given[0]]
        self._made_by[match[1]] = self._sources()
        return match[1]

    def _define(self, node: Any) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self._functions[name.text.decode()] = body

    def _call(self, name: str, arguments: list[str]) -> None:
        """Follow a call of the function `name`."""
        before = self._arguments, self._calls
        self._arguments, self._calls = arguments, self._sources()
        self._called.append(name)
        self._statement(self._functions[name])
        self._called.pop()
        self._arguments, self._calls = before

    def _has_step(self, node: Any, depth: int = 0) -> bool:
        """Return whether `node`, or a function that `node` calls, contains a command that starts workers."""
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
        """Follow the command if it is a `cd` to a folder whose path is known; return whether it was followed."""
        if words[0] != "cd" or len(words) != 2 or re.search(r"[`*?~]", words[1]):
            return False
        if re.fullmatch(r"\$\{?SLURM_SUBMIT_DIR\}?", words[1]) and not self.moved:
            return True  # `cd $SLURM_SUBMIT_DIR` has no effect: the script starts in this folder
        here = " ".join(self.values.get("PWD", []))
        if "$" in words[1] or not (words[1].startswith("/") or here.startswith("/")):
            return False
        folder = posixpath.normpath(posixpath.join(here, words[1]))
        self._go_to([folder], [folder] != self.values.get("SLURM_SUBMIT_DIR"))
        self._made_by["PWD"] = self._sources()
        return True

    def _unset(self, node: Any, line: int, text: str) -> None:
        names = [child.text.decode() for child in node.named_children if child.type == "variable_name"]
        if not all(name in self.values for name in names):
            self.found.others.append((text, line))
        for name in names:
            self.values.pop(name, None)
            self.found.exports.pop(name, None)

    def _list(self, node: Any) -> bool:
        """Follow `A && B` or `A || B`; return whether the list of commands succeeds.

        All commands except conditions are assumed to succeed.
        """
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
                self.found.used |= {left.start_byte, right.start_byte}
                return True
            self._decided(left, holds)
            done = holds if holds is not None else sign == "||" and "exit" in right.text.decode()
            if holds is None:
                self._assume(text, done, left.start_point[0] + 1)
        if done != (sign == "&&"):
            return done
        if right.type == "list":
            return self._list(right)
        self._statement(right)
        return True

    def _decided(self, condition: Any, holds: bool | None) -> None:
        """Record that the findings depend on a condition and, if its result is known, on the statements that decide
        it."""
        if holds is not None:
            self._use()
        self.found.used.add(condition.start_byte)

    def _on_failure(self, right: Any) -> None:
        if not re.match(r"(exit|return|true|:|echo|\{|\()", right.text.decode()):
            what = f"|| {right.text.decode()[:80]}: runs only if the command before it fails, and is not carried"
            self.found.notes.append((what, right.start_point[0] + 1))
            self.found.used.add(right.start_byte)

    def _case(self, node: Any, line: int, text: str) -> None:
        """Follow the branch of a `case` statement whose pattern is the first to match, if the value is known."""
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
                self._use()
                for child in item.children[closed:]:
                    if child.is_named:
                        self._statement(child)
                return

    def _not_set(self, branch: Any, body: list[Any]) -> None:
        """Add a note about the variables that are set in a branch that is assumed not to run."""
        names = sorted({name for statement in body for name in assigned_in(statement)})
        if names:
            text = f"{', '.join(names)}: set under a condition that is assumed to be false"
            self.found.notes.append((text, branch.start_point[0] + 1))

    def _assume(self, condition: str, yes: bool, line: int, body: Sequence[Any] = ()) -> None:
        shown = " ".join(condition.split())[:80]
        runs = [one.text.decode().partition("\n")[0] for one in body if one.type in ("command", "pipeline", "list")]
        runs = [one for one in runs if one.partition(" ")[0] not in (*_QUIET, "exit")]
        text = f"whether `{shown}` holds is unknown: assumed to be {'true' if yes else 'false'}"
        self.found.notes.append((text + (f", so `{runs[0][:80]}` is not run" if runs else ""), line))

    def _command(self, node: Any, line: int, text: str) -> None:
        words = self._words_of(node)
        named = [child for child in node.named_children if child.type == "variable_assignment"]
        if apart := lines_apart(node):
            for one in apart:
                self._statement(one)
            named = [one for one in named if one not in apart]
            first = rest_of(node)
            line, text = first.start_point[0] + 1, text.encode()[first.start_byte - node.start_byte :].decode()
            self.at = first.start_byte
            words = self._words_of(node)
            self.line = line
        if words[:1] == ["eval"] and not re.search(r"[;&|<>`]", re.sub(r"\$\([^()]*\)", "", " ".join(words))):
            words = split_words(" ".join(words[1:]))  # `eval` runs its arguments as a command
        given, words = variables_of_env(words)
        head = [word.rpartition("/")[2] for word in words]
        step = self._starts(words)
        if step:
            self._use()
            self.found.exports |= {name: (value, line) for name, value in given.items()}
            self._exported_by |= {name: {self.at} for name in given}
            if node.next_sibling is not None and node.next_sibling.type == "&":
                self.found.in_background.add(line)
        for one in named:
            assigned = self._assign(one) if step or not words else None
            if step and assigned is not None:  # in `A=1 srun ...`, A is set only for this command
                self._export(assigned, line)
        if step:
            self._expansions(node)
            self.found.steps.append((words, line))
            self.found.folders.append(" ".join(self.values["PWD"]) if self.moved and "PWD" in self.values else None)
            self._use()
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
            self._use()
        elif not head or head[0] not in _QUIET:
            if head and re.fullmatch(r"python[0-9.]*", head[0]) and any(word.endswith(".py") for word in words):
                self.found.alone.append((words, line))
            if head[:1] in (["cd"], ["pushd"], ["popd"]):
                self._go_to(None, True)
            if head[0] in _ENVIRONMENT and not any(re.search(r"[\s`*?;&|<>()'\"\\]", word) for word in words):
                self._use()
                text = " ".join(words)  # `words` contains the values of variables, not their names
                text = f"set -a; {text}; set +a" if self._exports_all else text
            self._not_followed(node, line, text)

    def _expansions(self, node: Any) -> None:
        """Add a note for each unquoted word of a command that the shell would expand, but a spec passes as text."""
        for child in node.named_children:
            parts = child.named_children if child.type == "concatenation" else [child]
            plain = "".join(one.text.decode() for one in parts if one.type in ("word", "brace_expression"))
            if child.type in ("word", "brace_expression", "concatenation") and _EXPANDED.search(plain):
                shown = child.text.decode()[:80]
                self._note(f"{shown}: the shell would expand it; the spec passes it as text")

    def _redirected(self, node: Any) -> None:
        for child in node.named_children:
            if child.type.endswith("redirect") and child.text.decode().strip() not in ("2>&1", "1>&2"):
                what = (child.text.decode().strip().splitlines() or [""])[0]
                self.found.notes.append(
                    (f"{what}: the target stores the workers' output; it is not redirected", self.line)
                )

    def _pipeline(self, node: Any, line: int, text: str) -> None:
        """Follow the first command of a pipeline if it starts workers.

        The later commands of the pipeline, such as `tee`, are not imported into the spec.
        """
        first, *rest = node.named_children
        steps, others = len(self.found.steps), len(self.found.others)
        self._statement(first)
        if len(self.found.steps) == steps:
            self.found.others[others:] = [(text, line)]
            return
        for one in rest:
            what = f"| {one.text.decode().strip()[:100]}"
            self.found.notes.append((f"{what}: the target stores the workers' output; it is not piped", line))

    def _if(self, node: Any, line: int) -> None:
        """Follow the first branch of an `if` whose condition is known to be true, or else the `else` branch."""
        clauses = [child for child in node.children if child.type in ("elif_clause", "else_clause")]
        for one in (node, *clauses):
            head, body = branch(one)
            before = len(self.found.notes)
            holds = self._holds(head.text.decode()) if head is not None else True
            if head is not None and not holds and (holds is None or len(self.found.notes) > before):
                self._not_set(one, body)
            if head is not None:
                self._decided(head, holds)
            if holds is None and head is not None:
                self._assume(head.text.decode(), False, head.start_point[0] + 1, body)
            elif holds:
                for child in body:
                    self._statement(child)
                return


def _is_condition(node: Any) -> bool:
    text = node.text.decode()
    return node.type in ("test_command", "negated_command") or text.startswith(("test ", "[ "))


def variables_of_env(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split the words of `env A=1 COMMAND` into the variables and the words of COMMAND."""
    given: dict[str, str] = {}
    if words[:1] != ["env"]:
        return given, words
    at = 1
    while at < len(words) and (match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[at], re.DOTALL)):
        given[match[1]] = match[2]
        at += 1
    return (given, words[at:]) if words[at:] else ({}, words)
