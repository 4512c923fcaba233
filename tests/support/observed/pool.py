"""Specs that are rendered for the record. They are put together from frozen parts, not drawn from the product's models:
a change of the models must not change them. `python -m observed --draw` draws new ones; see `draw.py`."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "tests" / "observed"
FILE = FOLDER / "pool.json"
Document = dict[str, Any]


class Text(str):
    """A long text, of which the record keeps a digest."""


@cache
def pool() -> Document:
    """The frozen parts (`parts`), specs by target (`specs`), and specs with a mistake (`wrong`)."""
    found: Document = json.loads(FILE.read_text())
    return found


def generated(target: str) -> list[Document]:
    """All generated specs of a target."""
    return [put_together(numbers) for numbers in pool()["specs"][target]]


def put_together(numbers: list[int], parts: list[Document] | None = None) -> Document:
    """One spec from parts of these numbers. Later parts replace values of earlier ones."""
    found: Document = {}
    for number in numbers:
        found = merged(found, (parts or pool()["parts"])[number])
    return copy.deepcopy(found)


def merged(below: Document, above: Document) -> Document:
    """Two specs as one: objects are merged, other values are replaced."""
    found = dict(below)
    for name, value in above.items():
        both = isinstance(found.get(name), dict) and isinstance(value, dict)
        found[name] = merged(found[name], value) if both else value
    return found


def compact(value: Any) -> str:
    """JSON on one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def text_of(document: Document) -> str:
    """The file of a spec."""
    return yaml.safe_dump(document, sort_keys=False)


def wrong(entry: Document, parts: list[Document] | None = None) -> Document:
    """A spec with a mistake: the parts `of`, with one value `set` or one key `removed`."""
    found = put_together(entry["of"], parts)
    for path, value in entry.get("set", {}).items():
        holder, key = _holder(found, path)
        holder[key] = value
    for path in entry.get("removed", ()):
        holder, key = _holder(found, path)
        del holder[key]
    return found


def _holder(document: Any, path: str) -> tuple[Any, Any]:
    *above, last = path.split(".")
    for part in above:
        document = document[int(part) if isinstance(document, list) else part]
    return document, int(last) if isinstance(document, list) else last
