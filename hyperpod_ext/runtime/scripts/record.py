"""Records of each rank's saves, in files that outlive the rank's processes, and the newest step that all ranks have
saved."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.files import make_private_folder, open_private, write_atomically

DCP_INDEX = ".metadata"
"""File that `torch.distributed.checkpoint` writes last, so that its presence marks a complete checkpoint folder."""
_KEPT = 64
"""Number of newest saves, and of newest steps with saves, that a rank's record contains."""
_STEPS = struct.Struct("<qq")


@dataclass(frozen=True, slots=True)
class Former:
    """The previous version of a saved file or folder."""

    place: str = ""
    """Path at which the previous version is kept; empty if no previous version is kept."""
    step: int = 0
    """Step of the previous version; 0 if an earlier run of the job saved that version."""
    lost: bool = False
    """Whether there was a previous version that is not kept."""


@dataclass(frozen=True, slots=True)
class Save:
    """A file or a checkpoint folder that the script has saved."""

    path: str
    """Path of the file or folder, with links resolved."""
    step: int
    """Newest step that the script had made when it saved."""
    nbytes: int
    """Size in bytes of the file, or of the folder's `.metadata`."""
    mtime_ns: int
    """Modification time of the file, or of the folder's `.metadata`."""
    former: str = ""
    """Path at which the previous version is kept; empty if no previous version is kept."""
    former_step: int = 0
    """Step of the previous version; 0 if an earlier run of the job saved that version."""
    lost: bool = False
    """Whether there was a previous version that is not kept."""

    @classmethod
    def of(cls, path: Path, step: int, former: Former | None = None, *, place: Path | None = None) -> Self:
        """Return the record of a save to `path`.

        Args:
            path: the final path.
            step: the save's step.
            former: the previous version; None: there is none.
            place: the present path of the saved file, if it is not at `path` yet.
        """
        nbytes, mtime_ns = _status(place or path)
        former = former or Former()
        return cls(str(path), step, nbytes, mtime_ns, former.place, former.step, former.lost)

    def is_current(self) -> bool:
        """Return whether the file or folder at `path` is still this version."""
        return self.is_at(Path(self.path))

    def is_at(self, place: Path) -> bool:
        """Return whether the file or folder at `place` is this version, by size and modification time."""
        try:
            return _status(place) == (self.nbytes, self.mtime_ns)
        except OSError:
            return False


def _status(path: Path) -> tuple[int, int]:
    status = (path / DCP_INDEX if path.is_dir() else path).stat()
    return status.st_size, status.st_mtime_ns


@dataclass(slots=True)
class SaveRecord:
    """The saves of one rank in this run of the job."""

    saves: dict[str, Save] = field(default_factory=dict)
    """The newest save at each path, in the order of the saves."""
    files: dict[int, int] = field(default_factory=dict)
    """Number of saves at each step."""
    folders: dict[str, int] = field(default_factory=dict)
    """Folders that the script created for its saves, each with the newest step that the script had made before."""
    is_moving: bool = False
    """Whether saves are being moved away after a fault, so that a file may be missing at its path."""

    @classmethod
    def read(cls, file: Path) -> Self:
        """Return the record in `file`, or an empty record if there is no file.

        Raises:
            JobFailedError: the file is damaged.
        """
        try:
            read = json.loads(file.read_bytes())
            saves = [Save(**one) for one in read["saves"]]
            by_path = {save.path: save for save in saves}
            return cls(by_path, dict(read["files"]), dict(read["folders"]), bool(read["is_moving"]))
        except FileNotFoundError:
            return cls()
        except (ValueError, TypeError, KeyError) as error:
            raise JobFailedError(
                f"{file}, which records the script's saves, is damaged: {error}",
                hint="Delete the file. This rank's steps are then counted from the newest step of the other ranks.",
            ) from error

    def write(self, file: Path) -> None:
        """Write the newest part of the record to `file`."""
        newest = {
            "saves": [asdict(one) for one in [*self.saves.values()][-_KEPT:]],
            "files": sorted(self.files.items())[-_KEPT:],
            "folders": [*self.folders.items()][-_KEPT:],
            "is_moving": self.is_moving,
        }
        make_private_folder(file.parent)
        write_atomically(file, json.dumps(newest))

    def add(self, save: Save) -> None:
        self.saves.pop(save.path, None)
        self.saves[save.path] = save
        self.files[save.step] = self.files.get(save.step, 0) + 1

    def exists(self) -> bool:
        """Return whether any recorded save or folder still exists at its path."""
        if self.is_moving:
            return True
        return any(save.is_current() for save in self.saves.values()) or any(
            Path(each).is_dir() for each in self.folders
        )

    def newest(self) -> int:
        """Return the newest step for which the script has begun a save, complete or not; 0 if there is none."""
        return max([*self.files, *self.folders.values()], default=0)

    def forget_after(self, step: int) -> None:
        """Forget the numbers of saves and the folders of steps after `step`, because these steps are repeated."""
        self.files = {made: files for made, files in self.files.items() if made <= step}
        self.folders = {folder: made for folder, made in self.folders.items() if made <= step}

    def newer_than(self, step: int) -> list[Save]:
        """Return the saves of steps after `step`."""
        return [save for save in self.saves.values() if save.step > step]


class Steps:
    """Two step numbers of a rank, in a file that outlives the rank's process.

    The numbers are the newest step that the rank has made, and a step that all ranks have saved.
    """

    def __init__(self, file: Path) -> None:
        make_private_folder(file.parent)
        with open_private(file, "a+b") as opened:
            opened.truncate(_STEPS.size)
            self._page = mmap.mmap(opened.fileno(), _STEPS.size)

    def get(self) -> tuple[int, int]:
        made, by_all = _STEPS.unpack_from(self._page)
        return made, by_all

    def set(self, made: int, by_all: int) -> None:
        _STEPS.pack_into(self._page, 0, made, by_all)


@dataclass(frozen=True, slots=True)
class Progress:
    """The steps that one rank had made and saved before its restart."""

    made: int
    """Newest step that the rank had made; 0: no step is known."""
    by_all: int
    """A step that all ranks have saved; 0: no such step is known."""
    newest: int
    """Newest step for which the rank has begun a save, complete or not; 0: no save was begun."""
    files: Mapping[int, int]
    """Number of this rank's saves at each step."""

    def has_saved(self, step: int, steps: Sequence[int]) -> bool:
        """Return whether the rank has finished its saves of `step`.

        A rank has finished the saves of a step if it has made a later step, or has saved as many files at this step as
        at an earlier step.

        Args:
            steps: steps at which any rank has saved.
        """
        if self.made > step or self.by_all >= step:
            return True
        earlier = [self.files.get(each, 0) for each in steps if each < min(step, self.made)]
        return bool(earlier) and self.files.get(step, 0) >= max(earlier)


def newest_of_all(ranks: Sequence[Progress]) -> int:
    """Return the newest step that every rank has finished saving; 0 if there is none.

    Ranks without a known step are ignored: their node was lost with its records, or they have no optimizer.
    """
    known = [one for one in ranks if one.made]
    steps = sorted({step for one in known for step in one.files}, reverse=True)
    return next((step for step in steps if all(one.has_saved(step, steps) for one in known)), 0)
