"""docs/architecture.md: the table of folders is made here; files and names that its text mentions are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import import_graph
import networkx

PAGE = "docs/architecture.md"
SIDES = {
    "container": r"hyperpod_ext\.(runtime|integrations|compat)",
    "laptop": r"hyperpod_ext\.(jobs|clusters|cli)",
    "both": r"",
}
"""Titles of the tables, and which packages each has; the first that fits."""
NAMED = re.compile(r"`([\w/]+\.py)`(?:\s+`(\w+)`)?")


def test_the_page_has_every_folder_in_the_order_in_which_imports_go_down(
    golden_part: Callable[[str, str, str], None],
) -> None:
    golden_part(PAGE, "folders", _tables())


def test_every_file_and_name_of_its_text_is_there(root: Path) -> None:
    assert list(_missing(root, (root / PAGE).read_text())) == []


def test_what_is_gone_would_be_found(root: Path) -> None:
    text = "`jobs/plan.py` `make_plan`, `jobs/plan.py` `make_plans`, `jobs/plans.py`, `tests/conftest.py`"
    assert list(_missing(root, text)) == ["jobs/plan.py make_plans", "jobs/plans.py"]


def _tables() -> str:
    known = import_graph.modules()
    edges = import_graph.of_folders(import_graph.graph(import_graph.imports(known), "load", "lazy", "typing"), known)
    imported_by = networkx.DiGraph({name: sorted(edges.get(name, ())) for name in _packages(known)}).reverse()
    layers = [sorted(layer) for layer in networkx.topological_generations(imported_by)]
    folders = [name for layer in layers for name in layer]
    return "\n".join(_table(title, _of_side(title, folders), known) for title in reversed(SIDES))


def _packages(known: Mapping[str, Path]) -> list[str]:
    return [name for name, file in known.items() if file.name == "__init__.py"]


def _of_side(title: str, folders: list[str]) -> list[str]:
    return [name for name in folders if next(side for side, its in SIDES.items() if re.match(its, name)) == title]


def _table(title: str, folders: list[str], known: Mapping[str, Path]) -> str:
    rows = [f"| {title} | what it does |", "|---|---|"]
    for name in folders:
        doc = ast.get_docstring(ast.parse(known[name].read_text())) or ""
        line = doc.partition("\n")[0].rstrip(":").replace("|", "\\|")
        rows.append(f"| `{name.removeprefix('hyperpod_ext.').replace('.', '/')}` | {line} |")
    return "\n".join(rows) + "\n"


def _missing(root: Path, text: str) -> Iterator[str]:
    for path, name in NAMED.findall(text):
        file = next((file for file in (root / "hyperpod_ext" / path, root / path) if file.is_file()), None)
        if file is None:
            yield path
        elif name and name not in _defined(file):
            yield f"{path} {name}"


def _defined(file: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
