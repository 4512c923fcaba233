"""Versions of a script's files that are not at their own paths: former ones, and those set aside after a fault."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.files import make_private_folder
from hyperpod_ext.runtime.scripts.record import Save, SaveRecord

_rename = os.rename  # while the script runs, its own renames are recorded
_FORMER = "former"
NEAR = ".hpx-saves"
"""Folder of other versions next to a file that is not on the file system of the run's folder."""


class Versions:
    """Other versions of one rank's files."""

    def __init__(self, run_dir: Path, rank: int, generation: int) -> None:
        self._run_dir, self._rank = run_dir, rank
        self._aside = f"set-aside/{time.strftime('%Y-%m-%dT%H-%M-%S')}-generation-{generation}"
        self._warned = False

    def keep(self, path: Path) -> str:
        """Keep the present version of `path`: of a file by a hard link, a folder is moved. Return its place; empty if
        that is impossible."""
        try:
            return str(self._place(_rename if path.is_dir() else os.link, path, _FORMER, self._name(path)))
        except OSError as error:  # the save itself must not fail
            if not self._warned:
                text = f"the former version of {path} cannot be kept: {error}. A fault between saves may end the job."
                sys.stderr.write(f"hyperpod_ext: warning: {text}\n")
            self._warned = True
            return ""

    def repair(self, record: SaveRecord) -> None:
        """Finish what a killed process has left: put a recorded file in its place, and move a folder back whose
        replacement was cut off after its former version had been moved."""
        for save in record.saves.values():
            path = Path(save.path)
            if save.is_at(unfinished := self.unfinished(path)):
                unfinished.replace(path)
            for root in (self._run_dir, path.parent / NEAR):
                former = root / _FORMER / self._name(path)
                if former.is_dir() and not path.exists():
                    former.rename(path)

    def unfinished(self, path: Path) -> Path:
        """Return the place at which this rank writes a file until it is complete."""
        return path.with_name(f".{path.name}.rank{self._rank}.unfinished")

    def _name(self, path: Path) -> str:
        return f"rank{self._rank}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"

    def drop(self, former: str) -> None:
        """Remove a former version."""
        if former:
            _remove(Path(former))

    def set_aside(self, record: SaveRecord, step: int) -> list[str]:
        """Move saves of steps after `step` away, and return their paths.

        A folder that the script made after `step` for its saves is moved whole. A file stays if its version of `step`
        is lost. Only recorded versions are moved, and no links.

        Raises:
            JobFailedError: a file cannot be moved.
        """
        newer = [Path(folder) for folder, made in record.folders.items() if made > step]
        outermost = [path for path in newer if not set(path.parents) & set(newer)]
        files = [Path(save.path) for save in record.newer_than(step) if _is_movable(save, step)]
        moved = []
        for number, path in enumerate([*outermost, *files]):
            if path.is_symlink() or not path.exists():  # it went with its folder, or another rank has moved it
                continue
            try:
                self._place(_rename, path, self._aside, f"rank{self._rank}-{number}-{path.name}")
            except FileNotFoundError:
                continue
            except OSError as error:
                raise JobFailedError(
                    f"{path} cannot be set aside: {error.strerror}. Its step is newer than {step}, the newest that all "
                    "ranks have saved",
                    hint=f"Move it away, so that the script loads step {step}, and start the job again.",
                ) from error
            moved.append(str(path))
        return moved

    def put_back(self, record: SaveRecord, step: int) -> None:
        """Put former versions back where files were set aside, and forget saves after `step`."""
        for save in record.newer_than(step):
            path = Path(save.path)
            if save.former and save.former_step <= step and not path.exists():
                with suppress(FileExistsError):  # another rank has put back the same file
                    (_rename if Path(save.former).is_dir() else os.link)(save.former, path)
                self.drop(save.former)
            if not save.is_current():
                del record.saves[save.path]
                if save.former_step and path.exists():
                    record.saves[save.path] = Save.of(path, save.former_step)
        record.forget_after(step)

    def drop_all(self, saves: Iterable[Save]) -> None:
        """Remove all former versions, and the folders that are empty then."""
        near = set()
        for save in saves:
            self.drop(save.former)
            near.add(Path(save.path).parent / NEAR)
        for folder in (self._run_dir / _FORMER, *(each / _FORMER for each in near), *near):
            with suppress(OSError):  # it has versions of other ranks, or those set aside; or there is none
                folder.rmdir()

    def _place(self, act: Callable[[Path, Path], None], path: Path, folder: str, name: str) -> Path:
        """Link or move `path` into the run's folder; if that is on another file system, next to `path`."""
        place = self._run_dir / folder / name
        try:
            return _placed(act, path, place)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        return _placed(act, path, path.parent / NEAR / folder / name)


def _placed(act: Callable[[Path, Path], None], path: Path, place: Path) -> Path:
    make_private_folder(place.parent)
    _remove(place)
    act(path, place)
    return place


def _remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _is_movable(save: Save, step: int) -> bool:
    """Return whether a save after `step` can be moved: no version of `step` is lost from its path."""
    is_kept = Path(save.former).exists() if save.former else not save.lost
    return is_kept and save.is_current() and save.former_step <= step
