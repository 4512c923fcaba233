"""The command `hp-ext data inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hyperpod_ext.user_folders import expanded

from ..checkpoints.table import age, size
from ..command import Command, output_option
from ..needs import need_packages
from ..output import columns, count, print_result

if TYPE_CHECKING:
    from hyperpod_ext.runtime.data.token_store.megatron import MegatronStore
    from hyperpod_ext.runtime.data.token_store.reader import TokenStore


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext data inspect
  hp-ext data inspect /nvme/data/wiki-0123456789abcdef --document 17
  hp-ext data inspect /fsx/megatron/corpus_text_document
  hp-ext data inspect train.arrow --field input_ids

\b
PLACE is a token store, a Megatron dataset (with or without .bin), a file of a dataset, or a folder of stores. Default:
$HPX_DATA_DIR, or the cache of this user. For an Arrow file, the output lists the columns that need no conversion.""",
)
@click.argument("place", required=False, type=click.Path(), metavar="[PLACE]")
@click.option("--document", type=click.IntRange(min=0), metavar="ID", help="Show the tokens of one document.")
@click.option("--field", metavar="COLUMN", help="Column of an Arrow file that has several token columns.")
@output_option()
def command(place: str | None, document: int | None, field: str | None, output: str) -> None:
    """Show a token store, a Megatron dataset, a file of a dataset, or all stores in a folder."""
    need_packages("numpy", "awscrt")
    from hyperpod_ext.runtime.data.convert.convert import default_place
    from hyperpod_ext.runtime.data.token_store.megatron import MegatronStore, is_megatron
    from hyperpod_ext.runtime.data.token_store.reader import TokenStore
    from hyperpod_ext.runtime.data.token_store.writer import ABOUT

    from .files import is_dataset

    folder = default_place() if place is None else expanded(place)
    if is_dataset(folder):
        _show_file(folder, document, field, output)
        return
    if field is not None:
        raise click.UsageError(f"--field is only for Arrow files, and {folder} is not an Arrow file")
    if not is_megatron(folder) and not (folder / ABOUT).exists():
        if document is not None:
            raise click.UsageError(f"--document needs a token store, and {folder} is not a token store")
        _list(folder, place is not None, output)
        return
    store: TokenStore | MegatronStore = MegatronStore(folder) if is_megatron(folder) else TokenStore(folder)
    found = of_store(store) if isinstance(store, TokenStore) else of_megatron(store)
    if document is not None:
        found["document"] = _document(store, document, int(found["documents"]))
    print_result(found, output, text_of(found))


def _show_file(path: Path, document: int | None, field: str | None, output: str) -> None:
    from .files import of_file, store_in, text_of_file

    store = store_in(path, field)
    found = of_file(path, store)
    if document is not None:
        if store is None:
            raise click.UsageError("--document needs a token store, or an Arrow file and --field")
        found["document"] = _document(store, document, len(store))
    print_result(found, output, text_of_file(found))


def of_store(store: TokenStore) -> dict[str, Any]:
    """Return the description of a token store as JSON."""
    infos = [segment.info for segment in store.segments]
    done = store.done or {}
    return {
        "kind": "store",
        "path": str(store.folder),
        "state": "finished" if store.finished else "growing",
        "fingerprint": store.fingerprint if store.finished else None,
        "documents": store.available,
        "tokens": store.tokens,
        "dtype": "/".join(sorted({info.dtype for info in infos})),
        "segments": len(infos),
        "nbytes": sum(info.nbytes for info in infos),
        "tokenizer": store.about["tokenizer"],
        "source": store.about["source"],
        "skipped": done.get("skipped", {}).get("count", 0),
        "skipped_examples": done.get("skipped", {}).get("examples", []),
    }


def of_megatron(store: MegatronStore) -> dict[str, Any]:
    """Return the description of a Megatron dataset as JSON, with the same fields as for a token store."""
    return {
        "kind": "megatron",
        "path": str(store.prefix),
        "state": "finished",
        "fingerprint": store.fingerprint,
        "documents": len(store),
        "tokens": store.tokens,
        "dtype": store.dtype.name,
        "nbytes": store.tokens * store.dtype.itemsize,
    }


def text_of(found: Mapping[str, Any]) -> str:
    """Return the description of a token store or a Megatron dataset as text."""
    lines = [("path", found["path"]), ("state", found["state"])]
    lines += [("fingerprint", found["fingerprint"] or "-"), ("documents", f"{found['documents']:,}")]
    lines += [("tokens", f"{found['tokens']:,} {found['dtype']}")]
    if "segments" in found:
        lines += [("size", f"{size(found['nbytes'])} in {count(found['segments'], 'segment')}")]
        lines += [("tokenizer", found["tokenizer"]), ("source", _source(found["source"]))]
    else:
        lines += [("size", f"{size(found['nbytes'])}, mapped in place")]
    if found.get("skipped"):
        lines += [("left out", count(found["skipped"], "record"))]
    if packed := found.get("packed"):
        lines += [("packed", f"{packed['samples']:,} samples of {packed['sequence_length']:,} tokens, {_how(packed)}")]
    if shown := found.get("document"):
        lines += [("document", f"{shown['id']}: {shown['length']:,} tokens"), ("", " ".join(map(str, shown["tokens"])))]
    return columns(lines)


def _how(packed: Mapping[str, Any]) -> str:
    return "documents whole" if packed["documents"] == "whole" else "documents one after the other"


def _source(files: list[dict[str, Any]]) -> str:
    total = size(sum(file["nbytes"] for file in files))
    return f"{files[0]['path']}, {total}" if len(files) == 1 else f"{len(files)} files, {total}"


def _document(store: Any, number: int, documents: int) -> dict[str, Any]:
    from hyperpod_ext.errors import NotFoundError

    if number >= documents:
        raise NotFoundError(f"there is no document {number}", hint=f"its documents are 0 to {documents - 1}")
    tokens = store[number]
    return {"id": number, "length": len(tokens), "tokens": tokens[:64].tolist()}


def _list(folder: Path, named: bool, output: str) -> None:
    import time

    from hyperpod_ext.errors import NotFoundError
    from hyperpod_ext.runtime.data.token_store.eviction import stores_in
    from hyperpod_ext.runtime.data.token_store.writer import DONE

    held = stores_in(folder) if folder.is_dir() else []
    if not held and named:
        raise NotFoundError(f"there is no token store in {folder}", hint="`hp-ext data build` builds one.")
    rows = [
        {
            "path": str(each.folder),
            "state": "finished" if (each.folder / DONE).exists() else "growing",
            "nbytes": each.nbytes,
            "used_at": each.used_at,
        }
        for each in held
    ]
    now = time.time()
    table = [("STORE", "STATE", "SIZE", "LAST USED")]
    table += [
        (each.folder.name, str(row["state"]), size(each.nbytes), age(now - each.used_at))
        for each, row in zip(held, rows, strict=True)
    ]
    print_result({"place": str(folder), "stores": rows}, output, columns(table) if rows else f"no stores in {folder}")
