"""Versions of a script's saved files that are kept at other paths than the script's.

This module keeps the previous versions of files that the script has saved again, and saves that were moved away after a
fault.
"""

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

_rename = os.rename  # the original `os.rename`, which is replaced while the script runs
_FORMER = "former"
"""Name of the folder for previous versions."""
NEAR = ".hpx-saves"
"""Name of the folder, next to a saved file, for its other versions if the run's folder is on another file system."""


class Versions:
    """Keeps, restores and deletes other versions of one rank's saved files."""

    def __init__(self, run_dir: Path, rank: int, generation: int) -> None:
        self._run_dir, self._rank = run_dir, rank
        self._aside = f"set-aside/{time.strftime('%Y-%m-%dT%H-%M-%S')}-generation-{generation}"
        self._warned = False

    def keep(self, path: Path) -> str:
        """Keep the current version of `path`: hard-link a file, move a folder.

        Returns:
            The path of the kept version; empty if the version cannot be kept.
        """
        try:
            return str(self._place(_rename if path.is_dir() else os.link, path, _FORMER, self._name(path)))
        except OSError as error:  # the script's save succeeds even if the previous version cannot be kept
            if not self._warned:
                text = f"the previous version of {path} cannot be kept: {error}. A fault between saves may end the job."
                sys.stderr.write(f"hyperpod_ext: warning: {text}\n")
            self._warned = True
            return ""

    def repair(self, record: SaveRecord) -> None:
        """Finish the saves that a killed process has left unfinished.

        A file that is recorded, but still has its temporary name, is renamed to its path. A folder whose previous
        version was moved away, but whose new version is not in its place, gets the previous version back.
        """
        for save in record.saves.values():
            path = Path(save.path)
            if save.is_at(unfinished := self.unfinished(path)):
                unfinished.replace(path)
            for root in (self._run_dir, path.parent / NEAR):
                former = root / _FORMER / self._name(path)
                if former.is_dir() and not path.exists():
                    former.rename(path)

    def unfinished(self, path: Path) -> Path:
        """Return the temporary path at which this rank writes a file until the file is complete."""
        return path.with_name(f".{path.name}.rank{self._rank}.unfinished")

    def _name(self, path: Path) -> str:
        return f"rank{self._rank}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"

    def drop(self, former: str) -> None:
        """Delete the kept previous version at the path `former`; do nothing if `former` is empty."""
        if former:
            _remove(Path(former))

    def set_aside(self, record: SaveRecord, step: int) -> list[str]:
        """Move saves of steps after `step` away, and return their original paths.

        A folder that the script created after `step` for its saves is moved with everything in it. A file stays in its
        place if its version of `step` is lost. Symbolic links, and files that differ from their record, also stay in
        their place.

        Raises:
            JobFailedError: a file cannot be moved.
        """
        newer = [Path(folder) for folder, made in record.folders.items() if made > step]
        outermost = [path for path in newer if not set(path.parents) & set(newer)]
        files = [Path(save.path) for save in record.newer_than(step) if _is_movable(save, step)]
        moved = []
        for number, path in enumerate([*outermost, *files]):
            if path.is_symlink() or not path.exists():  # a missing file was already moved
                continue
            try:
                self._place(_rename, path, self._aside, f"rank{self._rank}-{number}-{path.name}")
            except FileNotFoundError:
                continue
            except OSError as error:
                raise JobFailedError(
                    f"{path} cannot be moved away: {error.strerror}. It must be moved, because it is of a newer step "
                    f"than {step}, the newest that all ranks have saved",
                    hint=f"Move it yourself, so that the script loads step {step}, and start the job again.",
                ) from error
            moved.append(str(path))
        return moved

    def put_back(self, record: SaveRecord, step: int) -> None:
        """Put the previous versions of the moved files back at their paths, and forget the saves after `step`."""
        for save in record.newer_than(step):
            path = Path(save.path)
            if save.former and save.former_step <= step and not path.exists():
                with suppress(FileExistsError):  # another rank has already put back the same file
                    (_rename if Path(save.former).is_dir() else os.link)(save.former, path)
                self.drop(save.former)
            if not save.is_current():
                del record.saves[save.path]
                if save.former_step and path.exists():
                    record.saves[save.path] = Save.of(path, save.former_step)
        record.forget_after(step)

    def drop_all(self, saves: Iterable[Save]) -> None:
        """Delete all kept previous versions, and then the folders that have become empty."""
        near = set()
        for save in saves:
            self.drop(save.former)
            near.add(Path(save.path).parent / NEAR)
        for folder in (self._run_dir / _FORMER, *(each / _FORMER for each in near), *near):
            with suppress(OSError):  # the folder does not exist, or still has versions of other ranks
                folder.rmdir()

    def _place(self, act: Callable[[Path, Path], None], path: Path, folder: str, name: str) -> Path:
        """Link or move `path` to `name` in a subfolder of the run's folder, and return the new path.

        If the run's folder is on another file system, use the folder `NEAR` next to `path` instead.

        Args:
            act: links or moves the first path to the second path.
            folder: name of the subfolder.
        """
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
    """Return whether a save after `step` can be moved away: the version that it has replaced is not lost."""
    is_kept = Path(save.former).exists() if save.former else not save.lost
    return is_kept and save.is_current() and save.former_step <= step
