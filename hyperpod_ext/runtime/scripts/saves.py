"""Saves and loads of an unchanged script, each with the step at which it was saved."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

from hyperpod_ext.files import make_private_folder, write_atomically
from hyperpod_ext.runtime.fault_injection.from_worker import run_dir_of
from hyperpod_ext.runtime.training.run import Run

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

    A file that is being saved replaces the former one once it is whole, so that a killed process leaves no half a file.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._folder = run_dir_of() / _RECORDS
        self._own = self._folder / f"rank{run.rank}.json"
        self._saves = {save.path: save for save in _read(self._own)}
        self.loaded: int | None = None
        """Newest step among the saves that the script has loaded; None: it has loaded nothing."""

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record saves and loads inside."""
        replaced: list[tuple[Any, str, Callable[..., Callable[..., Any]]]] = [
            (torch, "save", self._saving_file),
            (torch, "load", self._loading_file),
            (dcp, "save", self._saving_folder),
            (dcp, "load", self._loading_folder),
        ]
        originals = [(module, name, getattr(module, name)) for module, name, _ in replaced]
        for module, name, wrap in replaced:
            setattr(module, name, wrap(getattr(module, name)))
        try:
            yield
        finally:
            for module, name, original in originals:
                setattr(module, name, original)

    def newest(self) -> Save | None:
        """Return the newest save of all ranks of this node that still exists."""
        existing = [save for save in self._known() if save.step and Path(save.path).exists()]
        return max(existing, key=lambda save: save.step, default=None)

    def _saving_file(self, save: Callable[..., None]) -> Callable[..., None]:
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

    def _loading_file(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def loading(f: Any, *arguments: Any, **options: Any) -> Any:
            loaded = load(f, *arguments, **options)
            if isinstance(f, str | os.PathLike):
                self._note_load(Path(f).resolve())
            return loaded

        return loading

    def _saving_folder(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def saving(*arguments: Any, **options: Any) -> Any:
            saved = save(*arguments, **options)
            if (path := _folder_of(options)) is not None:
                self._note_save(path)
            return saved

        return saving

    def _loading_folder(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def loading(*arguments: Any, **options: Any) -> None:
            load(*arguments, **options)
            if (path := _folder_of(options)) is not None:
                self._note_load(path)

        return loading

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


def _read(file: Path) -> list[Save]:
    try:
        return [Save(**one) for one in json.loads(file.read_bytes())]
    except FileNotFoundError:
        return []


def _replaceable(f: Any) -> Path | None:
    """Return the real path of a file that another can replace; None for streams, devices and pipes."""
    if not isinstance(f, str | os.PathLike):
        return None
    path = Path(f).resolve()
    return path if path.is_file() or not path.exists() else None


def _folder_of(options: dict[str, Any]) -> Path | None:
    """Return the folder of a call of `torch.distributed.checkpoint`; None if it is elsewhere."""
    storage = options.get("storage_writer") or options.get("storage_reader")
    place = options.get("checkpoint_id") or getattr(storage, "path", None)
    path = Path(place).resolve() if isinstance(place, str | os.PathLike) else None
    return path if path is not None and (path / _DCP_INDEX).exists() else None
