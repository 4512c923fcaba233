"""The navigation of the site: mkdocs.yml names committed pages, and stands for generated ones with `DIR/*`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from typing import Any


def expand(items: Sequence[Any], generated: Sequence[str]) -> list[Any]:
    """Return the navigation with the paths of generated pages in place of each pattern."""
    expanded: list[Any] = []
    for item in items:
        if isinstance(item, dict):
            expanded += [
                {title: expand(inner, generated) if isinstance(inner, list) else inner} for title, inner in item.items()
            ]
        elif "*" in item:
            expanded += [path for path in generated if fnmatch(path, item)]
        else:
            expanded.append(item)
    return expanded


def pages(items: Sequence[Any]) -> Iterator[str]:
    """Yield the path of every page in the navigation."""
    for item in items:
        if isinstance(item, dict):
            for inner in item.values():
                yield from pages(inner if isinstance(inner, list) else [inner])
        else:
            yield item
