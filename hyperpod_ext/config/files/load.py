"""Loads a file as a typed config, or reports all its mistakes at once."""

from __future__ import annotations

import copy
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from pydantic import ValidationError

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.files.checks import CHECKS, Check, ListFiles
from hyperpod_ext.config.files.document import Document, Path, dotted, parse
from hyperpod_ext.config.files.error_messages import translate
from hyperpod_ext.config.files.nearest import nearest
from hyperpod_ext.config.files.overrides import Override, apply_overrides
from hyperpod_ext.config.files.repair import overlaps, repair
from hyperpod_ext.errors import ConfigError, NotFoundError, Problem
from hyperpod_ext.files import open_regular

M = TypeVar("M", bound=Config)

Fill = Callable[[Document], None]
"""A function that fills in unset fields of a document before the document is checked."""

MoreChecks = Callable[[], Iterable[Check]]
"""A function that returns additional checks for a file with mistakes. For a file without mistakes, the caller of `read`
runs the additional checks itself."""

_MOST_BYTES = 1 << 20
"""Maximum size of a spec in bytes. The limit is needed because a spec is read completely before it is parsed."""
_MOST_ROUNDS = 10
"""Maximum number of rounds in which a document is validated and repaired. Several rounds are needed because one mistake
can hide another."""


@dataclass(frozen=True)
class Loaded(Generic[M]):
    """A config, and the document with the file and line of each of the config's values."""

    config: M
    document: Document

    def locate(self, problems: Iterable[Problem]) -> list[Problem]:
        """Add the file and the line to problems that have only the path of a field."""
        return [problem if problem.source else self._located(problem) for problem in problems]

    def check(self, checks: Iterable[Check]) -> list[Problem]:
        """Run checks on the config, and return their problems with file and line."""
        return list(_check(checks, self.config, self.document, set(), None))

    def _located(self, problem: Problem) -> Problem:
        place = self.document.location(self.document.path_of(problem.path))
        return replace(problem, source=place.source, line=place.line)


def load(model: type[M], path: str | pathlib.Path, overrides: Sequence[str | Override] = ()) -> M:
    """Read the YAML file `path` as a `model`, after applying `overrides` in the form of `--set` options.

    Raises:
        ConfigError: the file has mistakes. The error lists all mistakes, with lines and hints.
        NotFoundError: there is no file `path`.
    """
    return read(model, path, overrides).config


def load_text(
    model: type[M],
    text: str,
    source: str = "<text>",
    overrides: Sequence[str | Override] = (),
    list_files: ListFiles | None = None,
) -> M:
    """Read YAML text that is not in a file as a `model`. Without `list_files`, the existence of files that the text
    names is not checked."""
    return read_text(model, text, source, overrides, list_files).config


def read(
    model: type[M],
    path: str | pathlib.Path,
    overrides: Sequence[str | Override] = (),
    fill: Fill | None = None,
    more: MoreChecks | None = None,
) -> Loaded[M]:
    """Read the YAML file `path` as a `model`, with the line of each value. The path `-` stands for the standard input;
    files that this spec names are searched in the current folder."""
    if str(path) == "-":
        here = pathlib.Path()
        return read_text(model, text_of("-"), "-", overrides, lambda folder: _names_in(here / folder), fill, more)
    if str(path).endswith(".py"):
        hint = "name a spec, such as job.yaml"
        raise ConfigError([Problem("is a Python file, not a spec", source=str(path), hint=hint)])
    file, text = pathlib.Path(path), text_of(str(path))
    return read_text(model, text, str(path), overrides, lambda folder: _names_in(file.parent / folder), fill, more)


def read_text(
    model: type[M],
    text: str,
    source: str,
    overrides: Sequence[str | Override] = (),
    list_files: ListFiles | None = None,
    fill: Fill | None = None,
    more: MoreChecks | None = None,
) -> Loaded[M]:
    """Read YAML text as a `model`, with the line of each value."""
    document = parse(text, source)
    unreadable = bool(document.problems) and document.data is None
    if not unreadable:
        apply_overrides(document, overrides)
        if fill is not None:
            fill(document)
    problems = list(document.problems)
    config = None
    if not unreadable:
        config, found = _validate(model, document, list_files, more)
        problems += found
    if problems or config is None:
        raise ConfigError(_in_order(problems, source))
    return Loaded(config, document)


def _validate(
    model: type[M], document: Document, list_files: ListFiles | None, more: MoreChecks | None
) -> tuple[M | None, list[Problem]]:
    """Validate and repair the document repeatedly, until it is valid and the checks can run.

    Returns:
        The config from the repaired document, or None if the document cannot be repaired; and all problems.
    """
    problems: list[Problem] = []
    made_up: set[Path] = {document.path_of(problem.path) for problem in document.problems if problem.path}
    draft = replace(document, data=copy.deepcopy(document.data), locations=dict(document.locations))
    for _round in range(_MOST_ROUNDS):
        try:
            config = model.model_validate_json(json.dumps(draft.data))
        except ValidationError as error:
            mended: set[Path] = set()
            for detail in error.errors(include_url=False):
                problem = translate(detail, model, draft)
                if not problem.path or problem.path not in set(map(dotted, made_up)):
                    problems.append(problem)
                path = repair(detail, model, draft)
                if path is not None:
                    mended.add(path)
            made_up |= mended
        else:
            checks = CHECKS.get(model.__name__, ())
            problems += _check(checks, config, draft, made_up, list_files)
            if more is not None and (problems or document.problems):
                problems += _check(more(), config, draft, made_up, list_files)
            return config, problems
    return None, problems


def _check(
    checks: Iterable[Check], config: Config, document: Document, made_up: set[Path], list_files: ListFiles | None
) -> Iterator[Problem]:
    """Run the checks that read no repaired value, and yield their problems.

    Args:
        made_up: paths of values that the repair has changed.
    """
    for check in checks:
        if any(overlaps(read, path) for read in check.reads for path in made_up):
            continue
        for finding in check.run(config, list_files):
            yield replace(document.problem(finding.path, finding.message, finding.hint), rule=check.rule)


def _in_order(problems: list[Problem], source: str) -> list[Problem]:
    """Return problems without duplicates, sorted by line. Problems of the file come before problems of command-line
    options."""
    unique = list(dict.fromkeys(problems))
    return sorted(unique, key=lambda problem: (problem.source != source, problem.source, problem.line or 0))


def text_of(path: str, most: int = _MOST_BYTES) -> str:
    """Return the text of the file `path`, or of the standard input for `-`.

    Raises:
        ConfigError: the text is longer than `most` bytes or not UTF-8, or `path` is a pipe, a device or a folder.
        NotFoundError: there is no file `path`.
    """
    file = pathlib.Path(path)
    try:
        return _decoded(sys.stdin.buffer.read(most + 1) if path == "-" else _bytes_of(file, most), path, most)
    except FileNotFoundError:
        found = nearest(file.name, [name for name in _names_in(file.parent) if name.endswith((".yaml", ".yml"))])
        hint = f"did you mean {file.parent / found}?" if found else "`hp-ext init` writes a job.yaml to start from"
        raise NotFoundError(f"there is no file {file}", hint=hint) from None
    except OSError as error:
        hint = "name a file, or write `-` for the standard input"
        is_folder = os.path.isdir(file)  # noqa: PTH112 - Path.is_dir raises OSError if the folder above may not be read
        message = "is a folder, not a file" if is_folder else f"cannot be read: {error.strerror}"
        raise ConfigError([Problem(message, source=str(file), hint=hint)]) from None


def _bytes_of(file: pathlib.Path, most: int) -> bytes:
    """Read at most `most` + 1 bytes of a file, or of a stream with a path, such as the shell's `<(...)`."""
    opened = file.open("rb") if str(file).startswith(("/dev/fd/", "/dev/stdin", "/proc/self/fd/")) else None
    with opened or open_regular(file) as read:
        return read.read(most + 1)


def _decoded(raw: bytes, source: str, most: int) -> str:
    if len(raw) > most:
        hint = "a spec is much smaller; check the path"
        raise ConfigError([Problem(f"is larger than {most >> 20} MiB", source=source, hint=hint)])
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        hint = "save the file as UTF-8"
        raise ConfigError([Problem("is not UTF-8 text", source=source, line=line, hint=hint)]) from None


def _names_in(folder: pathlib.Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    except OSError:
        return []  # the caller reports that the file is missing
