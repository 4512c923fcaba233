"""Old stores make room for new ones: the one that was opened longest ago goes first, none that is in use."""

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
    """A store in a place, as eviction sees it."""

    folder: Path
    nbytes: int
    used_at: float
    """When it was last opened, Unix seconds."""


def choose_evictions(stores: Iterable[CachedStore], budget_bytes: int, keep: Iterable[Path] = ()) -> list[Path]:
    """Whom to evict, in this order, so that what is left fits the budget; all but `keep` if it never does. Pure."""
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
    """The stores of a place, by name."""
    found = []
    for about in sorted(place.glob(f"[!.]*/{ABOUT}")):
        with suppress(FileNotFoundError):  # evicted since
            folder = about.parent
            mark = folder / READERS
            used = (mark if mark.exists() else about).stat().st_mtime
            found.append(CachedStore(folder, nbytes_of(folder), used))
    return found


def nbytes_of(folder: Path) -> int:
    """Bytes of a store's files, unfinished ones included."""
    total = 0
    for inside, folders, files in os.walk(folder):  # goes on where another process removes folders meanwhile
        for name in (*folders, *files):
            with suppress(FileNotFoundError):
                total += Path(inside, name).stat().st_size
    return total


def evict(place: str | Path, budget_bytes: int, *, keep: Iterable[Path] = ()) -> list[Path]:
    """Remove stores until the rest fits; gives those that are gone. What is read or written now stays.

    Mappings of a store that is gone stay valid: the kernel frees its pages with the last of them.
    """
    root = expanded(place)
    for left in root.glob(f"{_EVICTED}*"):  # of an eviction that was killed
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
            folder.rename(aside)  # whoever looks sees all of it or none of it
            _delete(aside)
        return True
    except HyperpodExtError:
        if folder.exists():
            raise
        return True  # another evicted it meanwhile
    finally:
        for lock in locks:
            lock.release()


def _delete(folder: Path) -> None:
    with suppress(FileNotFoundError):  # two may be at it
        shutil.rmtree(folder)
