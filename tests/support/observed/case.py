"""One way to provoke an error, and tables of tests with wrong input."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from observed.pool import ROOT, Document, compact, text_of

_LONGEST = 160


@dataclass(frozen=True)
class Case:
    """A command that fails in a folder with these files."""

    area: str
    how: str
    """The mistake, in a few words."""
    words: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], None] | None = None
    """Makes what the command needs in the folder, such as a damaged checkpoint. Such cases are slower."""


@cache
def table_of(file: str) -> ModuleType:
    """A test module, whose tables of wrong input are used here, too. `file`: path below tests/."""
    path = ROOT / "tests" / file
    spec = importlib.util.spec_from_file_location(f"observed_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def parameters(file: str, test: str) -> list[Any]:
    """Parameters of a parametrized test."""
    (mark,) = [one for one in getattr(table_of(file), test).pytestmark if one.name == "parametrize"]
    return list(mark.args[1])


def spec_case(area: str, how: str, document: Document, target: str | None, *more: str) -> Case:
    """A spec that `hp-ext validate` refuses."""
    words = ("validate", "spec.yaml", *(("--target", target) if target else ()), *more)
    return Case(area, how, words, {"spec.yaml": text_of(document), "train.py": ""})


def short(value: Any) -> str:
    """Fields of a spec on one line, cut if they are long."""
    text = value if isinstance(value, str) else compact(value)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def numbered(cases: Iterator[Case]) -> Iterator[tuple[str, Case]]:
    """Each case with a key. Cases with the same words get numbers."""
    seen: dict[str, int] = {}
    for case in cases:
        key = f"{case.area}: {case.how}"
        seen[key] = seen.get(key, 0) + 1
        yield (key if seen[key] == 1 else f"{key} ({seen[key]})"), case
