"""The saves of each rank, in files that outlive its processes, and the newest step that all ranks have saved."""

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
"""File that completes a checkpoint folder of `torch.distributed.checkpoint`."""
_KEPT = 64
"""Newest saves, and steps with saves, that are remembered of a rank."""
_STEPS = struct.Struct("<qq")


@dataclass(frozen=True, slots=True)
class Former:
    """Place and step of a file's former version, as in `Save`."""

    place: str = ""
    step: int = 0
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Save:
    """A file or a checkpoint folder that the script has saved."""

    path: str
    """Real path."""
    step: int
    """Newest step that the script had made."""
    nbytes: int
    """Size of the file, or of the folder's index."""
    mtime_ns: int
    former: str = ""
    """Path at which the former version is kept; empty: it is not kept."""
    former_step: int = 0
    """Step of the former version; 0: an earlier run saved it."""
    lost: bool = False
    """Whether there was a former version, and it is not kept."""

    @classmethod
    def of(cls, path: Path, step: int, former: Former | None = None, *, place: Path | None = None) -> Self:
        """Return the record of a save to `path`. `place`: the saved file, if it is not at its path yet."""
        nbytes, mtime_ns = _status(place or path)
        former = former or Former()
        return cls(str(path), step, nbytes, mtime_ns, former.place, former.step, former.lost)

    def is_current(self) -> bool:
        """Return whether `path` still has this version."""
        return self.is_at(Path(self.path))

    def is_at(self, place: Path) -> bool:
        """Return whether this version is at `place`."""
        try:
            return _status(place) == (self.nbytes, self.mtime_ns)
        except OSError:
            return False


def _status(path: Path) -> tuple[int, int]:
    status = (path / DCP_INDEX if path.is_dir() else path).stat()
    return status.st_size, status.st_mtime_ns


@dataclass(slots=True)
class SaveRecord:
    """Saves of one rank in this run of the job."""

    saves: dict[str, Save] = field(default_factory=dict)
    """The newest save at each path, in the order of the saves."""
    files: dict[int, int] = field(default_factory=dict)
    """Number of saves at each step."""
    folders: dict[str, int] = field(default_factory=dict)
    """Folders that the script made for its saves, each with the newest step it had made."""
    is_moving: bool = False
    """Whether saves are being set aside, so that a file may be missing at its path."""

    @classmethod
    def read(cls, file: Path) -> Self:
        """
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
                hint="Remove it; steps are then counted from the newest one of other ranks.",
            ) from error

    def write(self, file: Path) -> None:
        """Write the newest saves to `file`."""
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
        """Return whether a recorded version, or a folder of saves, still exists."""
        if self.is_moving:
            return True
        return any(save.is_current() for save in self.saves.values()) or any(
            Path(each).is_dir() for each in self.folders
        )

    def newest(self) -> int:
        """Return the newest step with a save, complete or not; 0 without any."""
        return max([*self.files, *self.folders.values()], default=0)

    def forget_after(self, step: int) -> None:
        """Forget which saves later steps had: they are made again."""
        self.files = {made: files for made, files in self.files.items() if made <= step}
        self.folders = {folder: made for folder, made in self.folders.items() if made <= step}

    def newer_than(self, step: int) -> list[Save]:
        """Return the saves of later steps."""
        return [save for save in self.saves.values() if save.step > step]


class Steps:
    """Two steps of a rank, in a file that outlives its process: the newest made one, and one that all ranks saved."""

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
    """Steps of one rank before its restart."""

    made: int
    """Newest step that it had made; 0: none is known."""
    by_all: int
    """A step that all ranks have saved."""
    newest: int
    """Newest step with a save, complete or not."""
    files: Mapping[int, int]
    """Number of saves at each step."""

    def has_saved(self, step: int, steps: Sequence[int]) -> bool:
        """Return whether the rank has finished its saves of `step`: it has made a later step, or as many saves as at
        the earlier ones. `steps`: steps at which any rank has saved."""
        if self.made > step or self.by_all >= step:
            return True
        earlier = [self.files.get(each, 0) for each in steps if each < min(step, self.made)]
        return bool(earlier) and self.files.get(step, 0) >= max(earlier)


def newest_of_all(ranks: Sequence[Progress]) -> int:
    """Return the newest step that every rank has finished saving; 0 if there is none.

    Ranks without a known step do not count: their node was lost with its records, or they have no optimizer.
    """
    known = [one for one in ranks if one.made]
    steps = sorted({step for one in known for step in one.files}, reverse=True)
    return next((step for step in steps if all(one.has_saved(step, steps) for one in known)), 0)
