"""Evaluates a shell script as far as its values are known: words, variables, arrays, arithmetic, conditions. Pure."""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.jobs.imports.how import HOW
from hyperpod_ext.jobs.imports.shell_parts import (
    changed,
    end_of,
    heredoc,
    is_known,
    number_of,
    path_printed,
    split_words,
)

_NAME = re.compile(r"[A-Za-z_]\w*")
_CLUSTER = "/opt/sagemaker_cluster"
_EMPTY = r"\[\[?\s*(!?)\s*-([nz])\s+\"?\$\{?([A-Za-z_]\w*)(?::?-)?\}?\"?\s*\]\]?"
_QUOTED = "raw_string"
_OF_SLURM = r"\$\{?SLURM_\w+\}?"
"""Pattern of a Slurm variable (SLURM_*), which Slurm sets in the environment of each task, too."""
_NUMERIC = {"-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le}
_NUMERIC |= {"-gt": operator.gt, "-ge": operator.ge}
_SIGNS = {"<": "-lt", "<=": "-le", ">": "-gt", ">=": "-ge", "==": "-eq", "!=": "-ne"}
LONGEST = 100_000
"""Maximum number of characters of a variable's value. Values in real job files are far shorter."""


@dataclass
class Script:
    """Findings in a shell script that was analysed without running it. Lines are counted from 1."""

    exports: dict[str, tuple[str, int]] = field(default_factory=dict)
    steps: list[tuple[list[str], int]] = field(default_factory=list)
    """Words of the commands that start workers: srun, or a launcher."""
    others: list[tuple[str, int]] = field(default_factory=list)
    """Commands that the reader neither follows nor interprets."""
    prepare: list[list[str]] = field(default_factory=list)
    """Commands before the first step that prepare folders and files, if all words of the command are known."""
    strict: bool = False
    """Whether a failed command ends the script, because the script contains `set -e`."""
    hidden: list[tuple[str, int]] = field(default_factory=list)
    """Loops and other statements that contain a step but are not followed."""
    folders: list[str | None] = field(default_factory=list)
    """Current folder at each step; None means the folder of the submission, or an unknown folder."""
    alone: list[tuple[list[str], int]] = field(default_factory=list)
    """Commands in `others` that start a Python file without a launcher."""
    in_background: set[int] = field(default_factory=set)
    """Line numbers of steps that run in the background."""
    literal: set[str] = field(default_factory=set)
    """Words in single quotes: the script's shell expands nothing in these words, but a program that gets them may."""
    notes: list[tuple[str, int]] = field(default_factory=list)
    """Sentences about assumptions of the reader that may be wrong when the job runs."""
    remarks: list[tuple[str, int]] = field(default_factory=list)
    """Sentences about the script that are certainly also true when the job runs."""
    statements: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Text and line of every simple statement, by the position of the statement's first byte in the script."""
    used: set[int] = field(default_factory=set)
    """Positions of the statements on which the findings depend."""

    assigned: set[str] = field(default_factory=set)
    """Names of the variables that the script may set."""

    def unused(self) -> list[tuple[str, int]]:
        """Return text and line of the statements on which no finding depends."""
        return [one for at, one in self.statements.items() if at not in self.used]


class TooLongError(Exception):
    """Raised when a value is too long or too many statements run.

    Without limits, a few lines that double a value, or functions that call each other often, would exhaust memory.
    """


class _Variables(dict[str, list[str]]):
    """Values of shell variables, by name. Records in `read` which variables were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)

    def __getitem__(self, name: str) -> list[str]:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


class Values:
    """Variables at the current statement of a script, and evaluation of words and conditions with these variables."""

    def __init__(self) -> None:
        self.found = Script()
        self.values = _Variables()
        self.line = 1
        self.at = 0
        """Position of the first byte of the current statement in the script."""
        self._made_by: dict[str, set[int]] = {}
        """Positions of the statements that determine the value of each variable, by the variable's name."""
        self._calls: set[int] = set()
        """Positions of the function calls that are being followed, and of the statements that determine their
        arguments."""
        self._sets: str | None = None
        """Name of the variable to which the current statement assigns a value; None for other statements."""
        self._functions: dict[str, Any] = {}
        self._arguments: list[str] | None = None
        """Arguments of the innermost function that is being followed; None outside of functions, where `$1` is an
        argument of the script."""

    def _sources(self) -> set[int]:
        """Return the positions of the current statement and of all statements that determine the values read in it."""
        return {self.at, *self._calls}.union(*(self._made_by.get(name, ()) for name in self.values.read))

    def _use(self) -> None:
        self.found.used |= self._sources()

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
            return (match[2] == "n") != bool(match[1])  # Slurm sets variables whose names begin with SLURM
        if match[3] not in self.values:
            how = HOW.format(name=match[3])
            self.found.notes.append((f"{match[3]}: not set in the file: assumed to be empty ({how})", self.line))
        empty = not " ".join(self.values.get(match[3], []))
        return (empty == (match[2] == "z")) != bool(match[1])

    def _compared(self, condition: str) -> bool | None:
        """Evaluate a comparison such as `[ A -le B ]`, `[ A = B ]` or `(( A < B ))`; None if a value is not known."""
        if numbers := re.fullmatch(r"\(\(\s*(\w+|\$\{?\w+\}?)\s*([<>=!]=|[<>])\s*(\w+|\$\{?\w+\}?)\s*\)\)", condition):
            left, right = (one if re.match(r"[$\d]", one) else f"${one}" for one in (numbers[1], numbers[3]))
            condition = f"[ {left} {_SIGNS[numbers[2]]} {right} ]"
        match = re.fullmatch(r"\[\[?\s+(\S+)\s+(-\w\w|==?|!=)\s+(\S+)\s+\]\]?", condition.strip())
        if match is None or re.search(r"\$\{?\d", condition):
            return None  # not known: the condition has another form, or compares an argument
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
        name, bracket, index = str(target.text.decode()).partition("[")
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
        before = list(self.values.get(name, [])) if more or bracket else []
        if bracket:  # the assignment sets one item of an array
            at = self._expand(index.removesuffix("]"))
            if more or not at.isdecimal() or int(at) > len(before):
                self.values.pop(name, None)
                self._made_by[name] = self._sources()
                return None
            words, before = [" ".join(words), *before[int(at) + 1 :]], before[: int(at)]
        self.values[name] = before + words
        self._made_by[name] = self._sources()
        if sum(map(len, self.values[name])) > LONGEST:
            raise TooLongError
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
                before, *arrays = re.split(r"(?<!\\)\$\{(\w+)\[@\]\}", inner)
                found = [self._unquoted(before)]
                # as in bash, an array's first and last item are joined with the adjacent text
                for name, behind in zip(arrays[::2], arrays[1::2], strict=True):
                    first, *more = self._array(name) or [""]
                    found = [*found[:-1], found[-1] + first, *more]
                    found[-1] += self._unquoted(behind)
                return found if found != [""] or not arrays else []
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
        """Return the values of `$@` or `${@:2}`: the arguments of the current function or of the script.

        Args:
            first: number of the first argument to return, counted from 1.
        """
        if self._arguments is None:
            self._note("$@: arguments of the file in the sbatch command: assumed to be none")
        return list(self._arguments or [])[max(first - 1, 0) :]

    def _argument(self, name: str) -> str:
        """Return the value of an argument such as `$1`, of the current function or of the script."""
        if self._arguments is not None:
            return self._arguments[int(name) - 1] if int(name) <= len(self._arguments) else ""
        self._note(
            f"${name}: an argument of the file in the sbatch command: assumed to be empty ({HOW.format(name=name)})"
        )
        return ""

    def _note(self, text: str) -> None:
        """Add the note `text` with the current line, unless the same note exists already."""
        if not any(text == other for other, _line in self.found.notes):
            self.found.notes.append((text, self.line))

    def _words_of(self, command: Any) -> list[str]:
        """Return the words of a command.

        The parser splits words such as `$A/$1` into several nodes, so adjacent nodes are joined into one word.
        """
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

    def _unquoted(self, text: str) -> str:
        """Expand variables and escaped quotes in `text`, the content of a word in double quotes."""
        return self._expand(text).replace('\\"', '"')

    def _array(self, name: str, sign: str = "@") -> list[str]:
        """Return the items of the array `name`.

        An array that the script does not set is empty, because the environment of a script cannot contain arrays. If a
        skipped statement may set the array, the result is the unexpanded text `${name[@]}`.
        """
        if name not in self.values and any(re.search(rf"\b{name}\b", other) for other, _line in self.found.others):
            return [f"${{{name}[{sign}]}}"]  # a statement that is not followed may set the array
        if name not in self.values:
            self.found.remarks.append((f"{name}: this array is not set in the file, so it is empty", self.line))
        return list(self.values.get(name, []))

    def _expand(self, text: str) -> str:
        """Return `text` with known variables and defaults expanded. Unknown parts stay as written."""
        found, at = "", 0
        while at < len(text):
            if text[at] != "$" or (at and text[at - 1] == "\\"):
                found += text[at]
                at += 1
                continue
            end = end_of(text, at)
            part, read = text[at:end], set(self.values.read)
            found += (value := self._value(part))
            if value == part:
                self.values.read = read  # the part stays as written: forget which variables were read to evaluate it
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
            return part  # e.g. PATH=${PATH:-...}: keep it, because each node has its own PATH
        default = self._expand(match[3]).strip("\"'")
        self.found.notes.append((f"{name}: its default {default!r} is used", self.line))
        if "=" in match[2]:
            self.values[name] = [default]
        return default

    def _printed(self, command: str) -> str | None:
        """Return the output of a command in `$(...)`, such as `pwd`, `cat <<END` or `[ ... ] && echo ...`.

        Return None if the command's output is not known.
        """
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
        """Return the value of an expansion such as `${A##*/}`, `${#A}` or `${A[1]}`; None if the value is not known."""
        if array := re.fullmatch(r"\$\{([A-Za-z_]\w*)\[([*@])\]\}", part):
            return " ".join(self._array(array[1], array[2]))
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
        """Return the value of an arithmetic expression such as `$((2 * NODES))`; as written if a part is unknown."""
        inner = part.removeprefix("$((").removesuffix("))")
        filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: " ".join(self.values.get(match[1], ["?"])), inner)
        if not re.fullmatch(r"[\d\s()*/%+-]{1,200}", filled):
            return part
        try:
            found = number_of(ast.parse(filled.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return part
        return str(found)
