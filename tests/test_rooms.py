"""Folders of the product: no circles of imports, few files in each."""

from __future__ import annotations

from pathlib import Path

import import_graph
import pytest

KNOWN = import_graph.modules()


@pytest.fixture(scope="module")
def found() -> list[import_graph.Import]:
    """All imports of the product."""
    return list(import_graph.imports(KNOWN))


def test_no_modules_import_each_other_when_they_are_loaded(found: list[import_graph.Import]) -> None:
    assert import_graph.circles(import_graph.graph(found, "load")) == []


def test_no_folders_import_each_other_when_they_are_loaded(found: list[import_graph.Import]) -> None:
    assert import_graph.circles(import_graph.of_folders(import_graph.graph(found, "load"), KNOWN)) == []


def test_nor_where_imports_are_lazy_or_for_types(found: list[import_graph.Import]) -> None:
    of_any_kind = import_graph.graph(found, "load", "lazy", "typing")
    assert import_graph.circles(of_any_kind) == []
    assert import_graph.circles(import_graph.of_folders(of_any_kind, KNOWN)) == []


def test_a_folder_can_be_taken_in_at_a_glance(root: Path) -> None:
    counts = import_graph.files_by_folder(KNOWN)
    assert {folder: count for folder, count in counts.items() if count > 16} == {}
    assert counts[root / "hyperpod_ext" / "runtime"] <= 6  # what starts containers; the rest lies in rooms


@pytest.mark.parametrize(
    ("a", "when"),
    [
        ("import {b}\n", "load"),
        ("from {b} import name\n", "load"),
        ("if True:\n    from hyperpod_ext import b\n", "load"),
        ("def late():\n    import {b}\n", "lazy"),
        ("async def late():\n    async def later():\n        import {b}\n", "lazy"),
        ("from .b import name\n", "load"),
        ("from . import b\n", "load"),
        ("import typing\nif typing.TYPE_CHECKING:\n    from {b} import Name\n", "typing"),
    ],
)
def test_a_circle_is_found(tmp_path: Path, a: str, when: import_graph.When) -> None:
    package = tmp_path / "hyperpod_ext"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text(a.format(b="hyperpod_ext.b"))
    (package / "b.py").write_text("from hyperpod_ext import c\n")
    (package / "c.py").write_text("from hyperpod_ext.a import something\n")
    known = import_graph.modules(tmp_path)
    found = list(import_graph.imports(known))
    round_it = ["hyperpod_ext.a", "hyperpod_ext.b", "hyperpod_ext.c"]
    assert import_graph.circles(import_graph.graph(found, "load", when)) == [round_it]
    assert import_graph.circles(import_graph.graph(found, "load")) == ([round_it] if when == "load" else [])
