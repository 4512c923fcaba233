"""Templates of Helm, filled as Helm fills them: values, conditions, loops and the functions that job files use. Pure.

What a template needs and nobody gives is named. A function that is not known here is refused by its name: Helm itself
fills such a template.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.submit.imports.helm_functions import FUNCTIONS, is_true
from hyperpod_ext.submit.imports.helm_tree import Node, beyond, commands_of, text_of, tree

_DEEPEST = 8
"""Templates that use each other."""
_LARGEST = 4 * 2**20
"""Characters; no job file is as large."""
_HOW = "give it with --set {name}=VALUE, or those of a chart with --values FILE"


@dataclass(frozen=True)
class _Value:
    """A value, and where it is in the values that were given."""

    value: Any
    place: str = ""


@dataclass
class Filled:
    """A template with its values in it."""

    text: str
    lines: list[int]
    """Of each line of `text`, that of the template."""
    notes: list[Problem]
    """What was settled by a default, and what nothing gives."""


def fill_helm(text: str, values: Mapping[str, Any], source: str) -> Filled:
    """`text` with the values in it.

    Args:
        values: as in a values.yaml; below `Release` and `Chart` those of the release.

    Raises:
        ConfigError: a value is missing, and names each; or it does what only Helm itself can.
    """
    filler = _Filler(values, source)
    try:
        filler.run(tree(text, source))
    except RecursionError:
        raise beyond("is nested too deep", source, 1) from None
    if filler.needed:
        raise ConfigError([filler.problem(name, line, needed=True) for name, line in filler.needed.items()])
    notes = [filler.problem(name, line, default) for name, (line, default) in filler.defaults.items()]
    return Filled("".join(filler.parts), filler.lines, notes)


class _Filler:
    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._source = source
        self._root = _Value({"Values": values, "Release": values.get("Release"), "Chart": values.get("Chart")})
        self._variables: list[dict[str, _Value]] = [{"$": self._root}]
        self._templates: dict[str, list[Node]] = {}
        self._line = 1
        self._depth = self._size = 0
        self._blank = True
        self.parts: list[str] = []
        self.lines: list[int] = [1]
        self.needed: dict[str, int] = {}
        self.defaults: dict[str, tuple[int, str | None]] = {}

    def problem(self, name: str, line: int, default: str | None = None, needed: bool = False) -> Problem:
        """What is said of a value that nothing gives."""
        hint = _HOW.format(name=name)
        if needed:
            return Problem(f"the template needs a value for {name}", "", self._source, line, hint)
        what = f"its default {default!r} is taken" if default is not None else "nothing gives it: taken as empty"
        return Problem(what, name, self._source, line, hint)

    def run(self, nodes: Sequence[Node]) -> None:
        """All of a template, whose parts that have names may come after their use."""
        for node in nodes:
            if node.words[:1] in (["define"], ["block"]):
                self._templates[text_of(node.words[1])] = node.inside
        self._run(nodes, self._root)

    def _run(self, nodes: Sequence[Node], dot: _Value) -> None:
        for node in nodes:
            self._line = node.line
            try:
                self._one(node, dot)
            except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, re.error) as error:
                raise beyond(f"cannot be filled: {error}", self._source, node.line) from None

    def _one(self, node: Node, dot: _Value) -> None:
        head, *words = node.words or [""]
        match head:
            case "":
                self._write(node.text, node.line, literal=True)
            case "if":
                self._branch(node, dot, dot, self._truth(words, dot))
            case "with":
                found = self._pipeline(words, dot)
                self._branch(node, found, dot, is_true(found.value))
            case "range":
                self._range(node, words, dot)
            case "template":
                self._run_named(words, dot)
            case "define":
                return
            case "block":
                self._branch(node, self._pipeline(words[1:], dot), dot, True)
            case _:
                if not self._assigns(node.words, dot):
                    self._write(self._shown(self._pipeline(node.words, dot)), node.line)

    def _branch(self, node: Node, inside: _Value, outside: _Value, holds: bool) -> None:
        self._variables.append({})
        self._run(node.inside if holds else node.otherwise, inside if holds else outside)
        self._variables.pop()

    def _truth(self, words: list[str], dot: _Value) -> bool:
        found = self._pipeline(words, dot)
        if found.value is None and found.place:
            self._without_value(found.place, None)
        return is_true(found.value)

    def _range(self, node: Node, words: list[str], dot: _Value) -> None:
        names: list[str] = []
        if ":=" in words:
            names = [word for word in words[: words.index(":=")] if word != ","]
            words = words[words.index(":=") + 1 :]
        found = self._pipeline(words, dot)
        if found.value is None and found.place:
            self._without_value(found.place, None)
        rounds: Iterator[tuple[Any, Any]] = iter(())
        if isinstance(found.value, Mapping):
            rounds = ((key, found.value[key]) for key in sorted(found.value, key=str))
        elif isinstance(found.value, list):
            rounds = iter(enumerate(found.value))
        elif found.value is not None:
            raise TypeError(f"range over {str(found.value)[:40]!r}")
        any_round = False
        for key, value in rounds:
            any_round, item = True, _Value(value, f"{found.place}.{key}" if found.place else "")
            own = {names[-1]: item} if names else {}
            if len(names) > 1:
                own[names[0]] = _Value(key)
            self._variables.append(own)
            self._run(node.inside, item)
            self._variables.pop()
        if not any_round:
            self._run(node.otherwise, dot)

    def _run_named(self, words: list[str], dot: _Value) -> None:
        """Fill a named part of the template, where it is used."""
        body = self._templates.get(text_of(words[0]))
        if self._depth >= _DEEPEST:
            raise beyond(f"has the part {words[0]}, which uses itself", self._source, self._line)
        if body is None:
            raise beyond(f"uses the part {words[0]}, which the file does not have", self._source, self._line)
        given = self._pipeline(words[1:], dot) if words[1:] else _Value(None)
        self._depth += 1
        self._variables.append({"$": given})
        self._run(body, given)
        self._variables.pop()
        self._depth -= 1

    def _named(self, words: list[str], dot: _Value) -> str:
        """What a named part of the template comes to."""
        kept, self.parts = self.parts, []
        lines, self.lines = self.lines, [self._line]
        self._run_named(words, dot)
        text, self.parts, self.lines = "".join(self.parts), kept, lines
        return text

    def _assigns(self, words: list[str], dot: _Value) -> bool:
        if len(words) < 3 or words[1] not in (":=", "="):
            return False
        value = self._pipeline(words[2:], dot)
        scopes = reversed(self._variables) if words[1] == "=" else iter(self._variables[-1:])
        scope = next((one for one in scopes if words[1] == ":=" or words[0] in one), self._variables[-1])
        scope[words[0]] = value
        return True

    def _pipeline(self, words: list[str], dot: _Value) -> _Value:
        result: _Value | None = None
        for command in commands_of(words):
            result = self._command(command, dot, result)
        return result or _Value(None)

    def _command(self, words: list[str], dot: _Value, piped: _Value | None) -> _Value:
        if not words:
            raise ValueError("an empty action")
        head = words[0]
        if not re.fullmatch(r"[A-Za-z_]\w*", head) or head in ("true", "false", "nil"):
            found, rest = self._operand(words, dot)
            if rest or piped is not None:
                raise ValueError(f"`{' '.join(words)[:60]}`")
            return found
        if head == "include":
            return _Value(self._named(words[1:], dot))
        given: list[_Value] = []
        rest = words[1:]
        while rest:
            value, rest = self._operand(rest, dot)
            given.append(value)
        return self._call(head, [*given, *([piped] if piped is not None else [])])

    def _call(self, name: str, given: list[_Value]) -> _Value:
        if name not in FUNCTIONS:
            raise beyond(f"uses the function {name}, which is not known here", self._source, self._line)
        last = given[-1] if given else _Value(None)
        if name == "default" and len(given) == 2:
            if is_true(last.value):
                return last
            if last.place and last.value is None:
                self._without_value(last.place, str(given[0].value))
            return given[0]
        if name in ("and", "or"):
            stop = next((one for one in given if is_true(one.value) == (name == "or")), given[-1])
            return stop
        if name in ("quote", "squote", "toString", "join", "required") and last.value is None:
            return last  # and needed
        for one in given:
            if one.value is None and one.place:
                self._without_value(one.place, None)
        found = FUNCTIONS[name](*(one.value for one in given))
        if isinstance(found, str) and len(found) > _LARGEST:
            raise beyond(f"comes to more than {_LARGEST} characters", self._source, self._line)
        return _Value(found)

    def _operand(self, words: list[str], dot: _Value) -> tuple[_Value, list[str]]:
        head = words[0]
        if head == "(":
            depth = 0
            for at, word in enumerate(words):
                depth += (word == "(") - (word == ")")
                if depth == 0:
                    return self._pipeline(words[1:at], dot), words[at + 1 :]
            raise ValueError("a parenthesis that is not closed")
        rest = words[1:]
        if head[0] in '"`':
            return _Value(text_of(head)), rest
        if re.fullmatch(r"-?\d+(\.\d+)?", head):
            return _Value(float(head) if "." in head else int(head)), rest
        if head in ("true", "false", "nil"):
            return _Value({"true": True, "false": False}.get(head)), rest
        if head.startswith("$"):
            name, _, path = head.partition(".")
            scope = next((one for one in reversed(self._variables) if name in one), None)
            if scope is None:
                raise ValueError(f"{name} is not set")
            return _below(scope[name], path), rest
        if head.startswith("."):
            return _below(dot, head[1:]), rest
        raise ValueError(f"`{head}`")

    def _without_value(self, name: str, default: str | None) -> None:
        self.defaults.setdefault(name, (self._line, default))

    def _shown(self, found: _Value) -> str:
        if found.value is None or isinstance(found.value, Mapping | list):
            name = found.place or "what line holds here"
            self.needed.setdefault(name, self._line)
            self.defaults.pop(name, None)
            return ""
        return str(found.value).lower() if isinstance(found.value, bool) else str(found.value)

    def _write(self, text: str, line: int, literal: bool = False) -> None:
        """Add to what is filled; `literal`: lines of the template itself, which go on in it."""
        self._size += len(text)
        if self._size > _LARGEST:
            raise beyond(f"comes to more than {_LARGEST} characters", self._source, line)
        self.parts.append(text)
        for step, part in enumerate(text.split("\n")):
            here = line + step if literal else line
            if step:
                self.lines.append(here)
                self._blank = True
            if self._blank and part.strip():
                self.lines[-1], self._blank = here, False


def _below(found: _Value, path: str) -> _Value:
    """The value at `path` below another; None where there is none."""
    value, place = found.value, found.place
    for name in filter(None, path.split(".")):
        value = value.get(name) if isinstance(value, Mapping) else None
        top = name == "Values" and not place
        place = "" if top else f"{place}.{name}" if place else name
    return _Value(value, place)
