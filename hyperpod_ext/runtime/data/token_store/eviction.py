"""Removes old token stores to make room for new ones, least recently opened first. Never removes a store in use."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime.data.token_store.files import FileLock, explained
from hyperpod_ext.runtime.data.token_store.writer import ABOUT, LOCK, READERS
from hyperpod_ext.user_folders import expanded

_EVICTED = ".evicted-"


@dataclass(frozen=True, slots=True)
class CachedStore:
    """Folder, size and last use of a token store."""

    folder: Path
    nbytes: int
    used_at: float
    """Unix time at which the store was last opened, in seconds."""


def choose_evictions(stores: Iterable[CachedStore], budget_bytes: int, keep: Iterable[Path] = ()) -> list[Path]:
    """Return the token stores to remove, least recently used first, so that the remaining stores fit the budget.

    If the stores in `keep` alone exceed the budget, returns all other stores. Pure function."""
    stores, kept = list(stores), set(keep)
    over = sum(store.nbytes for store in stores) - budget_bytes
    chosen = []
    for store in sorted(stores, key=lambda store: store.used_at):
        if over <= 0:
            break
        if store.folder not in kept:
            chosen.append(store.folder)
            over -= store.nbytes
    return chosen


def stores_in(place: Path) -> list[CachedStore]:
    """Return all token stores in a folder, sorted by name."""
    found = []
    for about in sorted(place.glob(f"[!.]*/{ABOUT}")):
        with suppress(FileNotFoundError):  # another process has just evicted the store
            folder = about.parent
            mark = folder / READERS
            used = (mark if mark.exists() else about).stat().st_mtime
            found.append(CachedStore(folder, nbytes_of(folder), used))
    return found


def nbytes_of(folder: Path) -> int:
    """Return the total size in bytes of a store's files, including unfinished files."""
    total = 0
    for inside, folders, files in os.walk(folder):  # os.walk ignores folders that another process removes
        for name in (*folders, *files):
            with suppress(FileNotFoundError):
                total += Path(inside, name).stat().st_size
    return total


def evict(place: str | Path, budget_bytes: int, *, keep: Iterable[Path] = ()) -> list[Path]:
    """Remove token stores until the remaining stores fit the budget, and return the removed folders.

    Keeps stores that are being read or written.

    Mappings of a removed store stay valid, because the kernel frees pages only after the last mapping has ended.
    """
    root = expanded(place)
    for left in root.glob(f"{_EVICTED}*"):  # a process was killed while it deleted this folder
        _delete(left)
    gone: list[Path] = []
    busy = set(keep)
    while chosen := choose_evictions(stores_in(root), budget_bytes, busy):
        if _remove(chosen[0]):
            gone.append(chosen[0])
        else:
            busy.add(chosen[0])
    return gone


def _remove(folder: Path) -> bool:
    locks = [FileLock(folder / LOCK), FileLock(folder / READERS)]
    try:
        if not all(lock.acquire() for lock in locks):
            return False
        aside = folder.with_name(f"{_EVICTED}{folder.name}-{secrets.token_hex(4)}")
        with explained(folder):
            folder.rename(aside)  # rename first, so that readers see the complete store or no store
            _delete(aside)
        return True
    except HyperpodExtError:
        if folder.exists():
            raise
        return True  # another process has already deleted the token store
    finally:
        for lock in locks:
            lock.release()


def _delete(folder: Path) -> None:
    with suppress(FileNotFoundError):  # two processes may delete the folder at the same time
        shutil.rmtree(folder)
