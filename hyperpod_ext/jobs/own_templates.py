"""Checks of a user's own templates, and their differences from the shipped templates."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jinja2 import TemplateSyntaxError

from hyperpod_ext.config.files.nearest import suggest
from hyperpod_ext.errors import NotFoundError, Problem
from hyperpod_ext.jobs.contract.render import parse_template, template_names, template_text


@dataclass(frozen=True, slots=True)
class TemplateDifference:
    """Difference between a user's template and the shipped template with the same name."""

    name: str
    """Path of the template below its folder, such as `hyperpod_eks/job.yaml.j2`."""
    diff: str
    """Unified diff from the shipped template to the user's template; empty for equal templates."""


def template_problems(folder: Path) -> Iterator[Problem]:
    """Yield a problem for each template below `folder` that hp-ext would never use or cannot read.

    Raises:
        NotFoundError: `folder` does not exist.
    """
    known = template_names()
    names = _names(folder)
    if not names:
        hint = f"`hp-ext templates eject {folder}` writes the shipped templates"
        yield Problem("has no template, so it would have no effect", source=str(folder), hint=hint)
    for name in names:
        if name not in known:
            message = "is not the name of a shipped template, so it would never be used"
            yield Problem(message, source=str(folder / name), hint=_name_meant(name, folder, known))
            continue
        try:
            parse_template((folder / name).read_text(encoding="utf-8"))
        except TemplateSyntaxError as error:
            hint = f"`hp-ext templates show {name}` shows the original"
            yield Problem(f"cannot be read: {error.message}", source=str(folder / name), line=error.lineno, hint=hint)
        except UnicodeDecodeError:
            yield Problem("is not UTF-8 text", source=str(folder / name), hint="write it as UTF-8")


def _name_meant(name: str, folder: Path, known: list[str]) -> str:
    """Return a hint with the name that the user probably meant for a template with an unknown name.

    The folders of shipped templates have the names of targets, with underscores instead of hyphens.
    """
    meant = name.replace("-", "_")
    if f"{folder.name.replace('-', '_')}/{meant}" in known:
        return f"name the parent folder: --templates {folder.parent}, with {folder.name.replace('-', '_')}/{meant}"
    return f"rename it to {meant}" if meant in known else suggest(name, known)


def template_differences(folder: Path) -> list[TemplateDifference]:
    """Compare every template below `folder` with the shipped template of the same name.

    Raises:
        NotFoundError: `folder` does not exist.
    """
    known = set(template_names())
    return [_difference(folder, name) for name in _names(folder) if name in known]


def _difference(folder: Path, name: str) -> TemplateDifference:
    shipped = template_text(name).splitlines(keepends=True)
    own = (folder / name).read_text(encoding="utf-8").splitlines(keepends=True)
    lines = difflib.unified_diff(shipped, own, f"shipped/{name}", str(folder / name))
    return TemplateDifference(name, "".join(lines))


def _names(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise NotFoundError(f"there is no folder {folder}", hint=f"create it with `hp-ext templates eject {folder}`")
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.j2") if file.is_file())
