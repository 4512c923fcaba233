"""Describes how a file of a dataset can be read: mapped into memory directly, or only after a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.table import size
from ..output import columns

if TYPE_CHECKING:
    from hyperpod_ext.runtime.data.token_store.arrow import ArrowStore

IN_PLACE, CONVERTED = "mapped in place", "converted"


def is_dataset(path: Path) -> bool:
    """Return whether `path` is a file that `hp-ext data build` reads."""
    from hyperpod_ext.runtime.data.token_store.sources import kind_of

    return path.is_file() and kind_of(path) is not None


def is_mappable(path: Path, field: str) -> bool:
    """Return whether the column `field` of a file can be memory-mapped without conversion."""
    from hyperpod_ext.runtime.data.token_store.arrow import columns_of
    from hyperpod_ext.runtime.data.token_store.sources import kind_of

    return kind_of(path) == "arrow" and any(one.name == field and not one.converted for one in columns_of(path))


def store_in(path: Path, field: str | None) -> ArrowStore | None:
    """Memory-map the column `field` of an Arrow file. Without `field`, memory-map the only column that can be mapped.
    Return None if no column or several columns can be mapped.

    Raises:
        ConfigError: the column `field` cannot be memory-mapped.
    """
    from hyperpod_ext.runtime.data.token_store.arrow import ArrowStore, columns_of
    from hyperpod_ext.runtime.data.token_store.sources import kind_of

    if kind_of(path) != "arrow":
        return None
    able = [column.name for column in columns_of(path) if not column.converted]
    return ArrowStore(path, field) if field is not None else ArrowStore(path, able[0]) if len(able) == 1 else None


def of_file(path: Path, store: ArrowStore | None) -> dict[str, Any]:
    """Return the description of a dataset's file as JSON. With `store`, include the numbers of documents and tokens in
    the memory-mapped column of `store`."""
    from hyperpod_ext.runtime.data.token_store.arrow import columns_of
    from hyperpod_ext.runtime.data.token_store.sources import kind_of

    kind = kind_of(path)
    found: dict[str, Any] = {"kind": kind, "path": str(path), "nbytes": path.stat().st_size}
    if kind != "arrow":
        return {**found, "read": CONVERTED}
    shown = columns_of(path)
    found["read"] = CONVERTED if all(column.converted for column in shown) else IN_PLACE
    found["columns"] = [
        {
            "name": column.name,
            "type": column.type,
            "read": CONVERTED if column.converted else IN_PLACE,
            "why": column.converted,
        }
        for column in shown
    ]
    if store is not None:
        found |= {"column": store.column, "fingerprint": store.fingerprint, "documents": len(store)}
        found |= {"tokens": store.tokens, "dtype": store.dtype.name}
    return found


def text_of_file(found: Mapping[str, Any]) -> str:
    """Return the description of a dataset's file as text."""
    lines = [("path", found["path"]), ("size", size(found["nbytes"]))]
    if "columns" not in found:
        lines.append(("read", f"{CONVERTED}, by `hp-ext data build`"))
    for column in found.get("columns", ()):
        why = f" ({column['why']})" if column["why"] else ""
        lines.append((f"column {column['name']}", f"{column['type']}, {column['read']}{why}"))
    if "column" in found:
        lines += [("fingerprint", found["fingerprint"]), ("documents", f"{found['documents']:,}")]
        lines += [("tokens", f"{found['tokens']:,} {found['dtype']}")]
    if shown := found.get("document"):
        lines += [("document", f"{shown['id']}: {shown['length']:,} tokens"), ("", " ".join(map(str, shown["tokens"])))]
    return columns(lines)
