"""Saves and loads of an unchanged script, each with the step at which it was saved."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.files import make_private_folder, write_atomically
from hyperpod_ext.runtime.fault_injection.from_worker import run_dir_of
from hyperpod_ext.runtime.scripts.replaced import replaced
from hyperpod_ext.runtime.training.run import Run

_dcp: Any = checkpoint  # it does not export its functions explicitly
_RECORDS = "script-saves"
_KEPT = 64
"""Newest saves of a rank that are remembered."""
_DCP_INDEX = ".metadata"
"""File that completes a checkpoint folder of `torch.distributed.checkpoint`."""


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

    @classmethod
    def of(cls, path: Path, step: int) -> Save:
        status = (path / _DCP_INDEX if path.is_dir() else path).stat()
        return cls(str(path), step, status.st_size, status.st_mtime_ns)


class ScriptSaves:
    """What this script saves and loads with `torch.save` and `torch.distributed.checkpoint`, in this run of the job.

    A file is saved under a temporary name, and renamed once it is complete: a killed process leaves the previous file.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._folder = run_dir_of() / _RECORDS
        self._own = self._folder / f"rank{run.rank}.json"
        self._saves = {save.path: save for save in _read(self._own)}
        self.loaded: int | None = None
        """Newest step among the saves that the script has loaded; None: it has loaded nothing."""

    def recorded(self) -> contextlib.AbstractContextManager[None]:
        """Record saves and loads inside."""
        return replaced(
            [
                (torch, "save", self._saving(torch.save)),
                (torch, "load", _then(torch.load, _file_of, self._note_load)),
                (_dcp, "save", _then(_dcp.save, _folder_of, self._note_save)),
                (_dcp, "load", _then(_dcp.load, _folder_of, self._note_load)),
            ]
        )

    def newest(self) -> Save | None:
        """Return the newest save of all ranks of this node that still exists."""
        existing = [save for save in self._known() if save.step and Path(save.path).exists()]
        return max(existing, key=lambda save: save.step, default=None)

    def _saving(self, save: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(save)
        def saving(obj: object, f: Any, *arguments: Any, **options: Any) -> None:
            path = _replaceable(f)
            if path is None:
                save(obj, f, *arguments, **options)
                return
            unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
            try:
                save(obj, unfinished, *arguments, **options)
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)
            self._note_save(path)

        return saving

    def _note_save(self, path: Path) -> None:
        self._saves.pop(str(path), None)
        self._saves[str(path)] = Save.of(path, self._run.step)
        newest = [asdict(one) for one in [*self._saves.values()][-_KEPT:]]
        make_private_folder(self._folder)
        write_atomically(self._own, json.dumps(newest))
        self._run.saved_by_script(str(path))

    def _note_load(self, path: Path) -> None:
        steps = [save.step for save in self._known() if save.path == str(path) and Save.of(path, save.step) == save]
        self.loaded = max([*steps, self.loaded or 0])

    def _known(self) -> list[Save]:
        return [save for file in self._folder.glob("*.json") for save in _read(file)]


def _then(
    call: Callable[..., Any], path_of: Callable[..., Path | None], note: Callable[[Path], None]
) -> Callable[..., Any]:
    """Return `call`, followed by `note` of the path in its arguments, if there is one."""

    @functools.wraps(call)
    def noting(*arguments: Any, **options: Any) -> Any:
        result = call(*arguments, **options)
        if (path := path_of(*arguments, **options)) is not None:
            note(path)
        return result

    return noting


def _read(file: Path) -> list[Save]:
    """
    Raises:
        JobFailedError: the file is damaged.
    """
    try:
        return [Save(**one) for one in json.loads(file.read_bytes())]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError) as error:
        raise JobFailedError(
            f"{file}, which records the script's saves, is damaged: {error}",
            hint="Remove it; steps are then counted from the newest one of other ranks.",
        ) from error


def _file_of(f: Any, *_: Any, **__: Any) -> Path | None:
    """Return the real path of a call of `torch.load`; None for a stream."""
    return Path(f).resolve() if isinstance(f, str | os.PathLike) else None


def _replaceable(f: Any) -> Path | None:
    """Return the real path of a file that another can replace; None for streams, devices and pipes."""
    path = _file_of(f)
    return path if path is not None and (path.is_file() or not path.exists()) else None


def _folder_of(*_: Any, **options: Any) -> Path | None:
    """Return the folder of a call of `torch.distributed.checkpoint`; None if it is elsewhere."""
    storage = options.get("storage_writer") or options.get("storage_reader")
    path = _file_of(options.get("checkpoint_id") or getattr(storage, "path", None))
    return path if path is not None and (path / _DCP_INDEX).exists() else None
