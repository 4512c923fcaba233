"""Who imports whom in the product, and where that goes round in circles: `python tests/support/import_graph.py`.

An import counts as `load` where it runs when the module is loaded, as `lazy` inside of a function, and as `typing`
below `if TYPE_CHECKING`. A folder imports another one where a module in it does; a package's own `__init__.py` lies in
it.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import resolve_name
from pathlib import Path
from typing import Literal, NamedTuple

import networkx

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("hyperpod_ext", "cli")
FACE = "hyperpod_ext"
"""Offers names of all folders, loaded on first use by scripts of users: nothing of ours imports through it."""

When = Literal["load", "lazy", "typing"]
Graph = dict[str, set[str]]


class Import(NamedTuple):
    """One module needs another."""

    by: str
    of: str
    when: When


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Dotted name of each module of the product, and its file."""
    files = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
    return {_name(file.relative_to(root)): file for file in files}


def _name(file: Path) -> str:
    parts = file.with_suffix("").parts
    if parts[0] == "cli":  # installed as hyperpod_ext.cli, and imported so
        parts = ("hyperpod_ext", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(known: Mapping[str, Path]) -> Iterator[Import]:
    """Imports between modules in `known`. Of `from a import b`, `a.b` where that is a module, else `a`."""
    for name, file in known.items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for names, when in _named(ast.parse(file.read_text()), package, "load"):
            if name == FACE and when == "typing":
                continue
            for of in names:
                found = of if of in known else of.rpartition(".")[0]
                if found in known and found != name:
                    yield Import(name, found, when)


def _named(node: ast.AST, package: str, when: When) -> Iterator[tuple[list[str], When]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield [alias.name for alias in child.names], when
        elif isinstance(child, ast.ImportFrom):
            name = "." * child.level + (child.module or "")
            origin = resolve_name(name, package) if child.level else name
            yield [f"{origin}.{alias.name}" for alias in child.names], when
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from _named(child, package, "typing")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _named(child, package, "lazy" if when == "load" else when)
        else:
            yield from _named(child, package, when)


def graph(found: Iterable[Import], *when: When) -> Graph:
    """Which modules each one imports."""
    edges: Graph = defaultdict(set)
    for one in found:
        if one.when in when:
            edges[one.by].add(one.of)
    return edges


def of_folders(edges: Graph, known: Mapping[str, Path]) -> Graph:
    """Which folders import which others."""
    folders = {name: name if file.stem == "__init__" else name.rpartition(".")[0] for name, file in known.items()}
    found: Graph = defaultdict(set)
    for by, names in edges.items():
        found[folders[by]] |= {folders[of] for of in names} - {folders[by]}
    return found


def circles(edges: Graph) -> list[list[str]]:
    """Sets of more than one node in which each can be reached from each, sorted."""
    found = networkx.strongly_connected_components(networkx.DiGraph(edges))
    return sorted(sorted(nodes) for nodes in found if len(nodes) > 1)


def files_by_folder(known: Mapping[str, Path]) -> dict[Path, int]:
    """How many modules lie in each folder, its `__init__.py` not counted."""
    return Counter(file.parent for file in known.values() if file.name != "__init__.py")


def main() -> None:
    known = modules()
    found = list(imports(known))
    for label, when in (
        ("when they are loaded", ("load",)),
        ("with lazy and typing imports", ("load", "lazy", "typing")),
    ):
        edges = graph(found, *when)  # type: ignore[arg-type]  # a tuple of literals
        for kind, circle in (("modules", circles(edges)), ("folders", circles(of_folders(edges, known)))):
            print(f"circles of {kind} {label}: {len(circle)}")
            for one in circle:
                print("   ", " ".join(one))


if __name__ == "__main__":
    main()
