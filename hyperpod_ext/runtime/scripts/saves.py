"""Record the saves and loads of an unchanged script, each with the step at which the file was saved."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint

from hyperpod_ext.runtime.scripts.folders import FolderSave, warn_of_overwriting
from hyperpod_ext.runtime.scripts.record import DCP_INDEX, Former, Progress, Save, SaveRecord, newest_of_all
from hyperpod_ext.runtime.scripts.replaced import replaced
from hyperpod_ext.runtime.scripts.script_run import ScriptRun
from hyperpod_ext.runtime.scripts.versions import Versions

_dcp: Any = checkpoint  # typed as Any, because torch's module does not export its functions explicitly
Call = Callable[..., Any]


class ScriptSaves:
    """Records this rank's saves and loads with torch, safetensors and `torch.distributed.checkpoint`.

    A file is saved under a temporary name and renamed once it is complete, so that a process that is killed during a
    save leaves the previous version of the file.
    """

    def __init__(self, run: ScriptRun) -> None:
        self._run = run
        self._file = run.record_of(run.rank)
        self._versions = Versions(run.run_dir, run.rank, run.generation)
        record = SaveRecord.read(self._file)
        self._versions.repair(record)
        self._record = record if record.exists() else SaveRecord()  # the user may have deleted all recorded saves
        self._made: dict[Path, int] = {}
        """Folders that the script has created in this process, each with the newest step that the script had made
        before."""
        self._lock = threading.RLock()  # this lock is for asynchronous saves, which end in other threads
        self._pid = os.getpid()
        self.loaded: int | None = None
        """Newest step among the saves that the script has loaded before its loop; 0: the script has loaded only other
        files; None: the script has loaded nothing."""
        self._has_begun = False
        """Whether the script's loop has begun. Loads during the loop are ignored: they may be loads of samples."""

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the saves and loads inside the context."""
        places: list[tuple[Any, str, Call]] = [
            (torch, "save", self._saving(torch.save)),
            (torch, "load", self._then(torch.load, self._note_load, _first_of)),
            (_dcp, "save", self._saving_folder(_dcp.save)),
            (_dcp, "async_save", self._saving_later(_dcp.async_save)),
            (_dcp, "load", self._then(_dcp.load, self._note_load, _folder_of)),
            (os, "mkdir", self._then(os.mkdir, self._note_folder, _first_of)),
            (os, "rename", self._renaming(os.rename)),
            (os, "replace", self._renaming(os.replace)),
        ]
        if importlib.util.find_spec("safetensors") is not None:
            safetensors = importlib.import_module("safetensors.torch")
            places += [
                (safetensors, "serialize_file", self._saving(safetensors.serialize_file)),
                (safetensors, "safe_open", self._then(safetensors.safe_open, self._note_load, _first_of)),
            ]
        with replaced(places):
            yield

    def newest(self) -> Save | None:
        """Return the newest existing save of the ranks with records in this node's run folder, or None."""
        existing = [save for save in self._known() if save.step and Path(save.path).exists()]
        return max(existing, key=lambda save: save.step, default=None)

    def begin(self, step: int) -> None:
        """Report that the script begins its loop after `step`."""
        self._has_begun = True
        self._record.forget_after(step)
        self._run.begin(step, self.loaded)

    def go_back(self) -> None:
        """Move saves away that are newer than the newest step that all ranks have saved. Collective.

        If the previous version of a moved file was kept, that version is put back.

        Raises:
            JobFailedError: a file cannot be moved.
        """
        made, by_all = self._run.steps.get()
        own = asdict(Progress(made, by_all, self._record.newest(), self._record.files))
        step, newest = json.loads(self._run.link.agree("saves", json.dumps(own), _choose))
        if not newest:
            return
        self._run.resume_after(step)
        if step == newest:
            return
        self._record.is_moving = True
        self._record.write(self._file)
        moved = self._versions.set_aside(self._record, step)
        self._run.link.agree("set-aside", "", _nothing)  # wait until all ranks have moved saves
        self._versions.put_back(self._record, step)
        self._record.is_moving = False
        self._record.write(self._file)
        if moved:
            self._run.set_aside(moved)
        self._run.link.agree("put-back", "", _nothing)

    def end(self) -> None:
        """Delete the kept previous versions of files, after the script has ended on all ranks."""
        self._versions.drop_all(self._record.saves.values())

    # --- calls of the script ----------------------------------------------------------------------

    def _saving(self, save: Call) -> Call:
        """Wrap a function `save(obj, file, ...)`, so that it writes the file under a temporary name and records it."""

        @functools.wraps(save)
        def saving(obj: object, f: Any, *arguments: Any, **options: Any) -> None:
            path = _path_of(f)
            if path is None or os.getpid() != self._pid:
                save(obj, f, *arguments, **options)
                return
            named = isinstance(f, str | os.PathLike) and _is_replaceable(path)
            if not named or not self._save_and_replace(path, lambda file: save(obj, file, *arguments, **options)):
                self._save_in_place(path, lambda: save(obj, f, *arguments, **options))

        return saving

    def _save_and_replace(self, path: Path, save: Callable[[Path], None]) -> bool:
        """Save under a temporary name and rename the file to `path`. Returns False if no file can be created in the
        folder of `path`."""
        self._begin_save(path)
        unfinished = self._versions.unfinished(path)
        try:
            save(unfinished)
            # record the save first, so that a process killed before the rename leaves no file newer than its record
            saved = self._record_save(Save.of(path, self._run.step, self._keep_former(path), place=unfinished))
            unfinished.replace(path)
        except (OSError, RuntimeError):
            if not unfinished.exists():
                return False
            raise
        finally:
            unfinished.unlink(missing_ok=True)
        self._run.saved(saved.path, saved.step)
        return True

    def _save_in_place(self, path: Path, save: Callable[[], None]) -> None:
        """Save to `path` in place, and record the save.

        The file may already be empty, because opening a stream for writing empties the file. If the file is empty, only
        the record shows whether there was a previous version.
        """
        before = self._record.saves.get(str(path))
        existed = before is not None or (path.is_file() and path.stat().st_size > 0)
        save()
        if path.is_file():
            self._note_save(path, Former(step=before.step if before is not None else 0, lost=existed))

    def _saving_folder(self, save: Call) -> Call:
        """Wrap a function `save(state, checkpoint_id=...)`, so that it replaces the folder once the new version is
        complete, and records it."""

        @functools.wraps(save)
        def saving(*arguments: Any, **options: Any) -> Any:
            path = _folder_of(**options)
            if path is None or os.getpid() != self._pid:
                return save(*arguments, **options)
            self._begin_save(path)
            folder, former = FolderSave(path, options), Former()

            def put() -> None:
                nonlocal former
                former = self._keep_former(path)
                if path.is_dir():  # `_keep_former` does not move a folder that is incomplete or of this step
                    shutil.rmtree(path)
                folder.unfinished.rename(path)

            result = folder.run(functools.partial(save, *arguments), put)
            if (path / DCP_INDEX).exists():
                self._note_save(path, former if former.place else replace(former, lost=folder.existed))
            return result

        return saving

    def _saving_later(self, save: Call) -> Call:
        """Wrap an asynchronous `save(state, checkpoint_id=...)`, so that the folder is recorded when the save ends."""

        @functools.wraps(save)
        def saving(*arguments: Any, **options: Any) -> Any:
            step, path = self._run.step, _folder_of(**options)
            existed = path is not None and (path / DCP_INDEX).exists()
            if path is not None and existed and self._run.rank == 0:
                warn_of_overwriting(path)
            if path is not None:
                self._begin_save(path)
            result = save(*arguments, **options)

            def note(done: Any) -> None:
                if path is not None and (path / DCP_INDEX).exists() and done.exception() is None:
                    self._note_save(path, Former(lost=existed), step)

            later: Any = getattr(result, "upload_completion", result)
            later.add_done_callback(note)
            return result

        return saving

    def _renaming(self, rename: Call) -> Call:
        """Wrap a function `rename(source, target)`, so that it records the new paths of renamed saves."""

        @functools.wraps(rename)
        def renaming(src: Any, dst: Any, *arguments: Any, **options: Any) -> None:
            source, target = _path_of(src), _path_of(dst)
            saves = self._saves_at(source)
            if arguments or options or not saves or source is None or target is None:
                rename(src, dst, *arguments, **options)
                return
            former = self._keep_former(target)
            rename(src, dst)
            with self._lock:
                for save in saves:
                    path = target / Path(save.path).relative_to(source)
                    del self._record.saves[save.path]
                    self._record.saves[str(path)] = Save.of(path, save.step, former if path == target else None)
                if source in self._made:
                    self._made[target] = self._made.pop(source)
                if (made := self._record.folders.pop(str(source), None)) is not None:
                    self._record.folders[str(target)] = made
                self._record.write(self._file)

        return renaming

    def _then(self, call: Call, note: Callable[[Path | None], None], path_of: Callable[..., Path | None]) -> Call:
        """Wrap `call`, so that after each call `note` is called with the path among the arguments.

        `path_of` returns that path from the arguments of a call.
        """

        @functools.wraps(call)
        def noting(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            if os.getpid() == self._pid:
                note(path_of(*arguments, **options))
            return result

        return noting

    # --- records ----------------------------------------------------------------------------------

    def _begin_save(self, path: Path) -> None:
        """Record the folder of a new save to `path`, and delete the previous version that is kept for `path`."""
        with self._lock:
            made = [each for each in [path, *path.parents] if each in self._made]
            if made and str(made[-1]) not in self._record.folders:
                self._record.folders[str(made[-1])] = self._made[made[-1]]
                self._record.write(self._file)
            before = self._record.saves.get(str(path))
            if before is not None and before.step < self._run.step:
                self._versions.drop(before.former)

    def _keep_former(self, path: Path) -> Former:
        """Keep the current version of the file or checkpoint folder that a save is about to replace at `path`."""
        before = self._record.saves.get(str(path))
        if before is not None and before.step == self._run.step:
            return Former(before.former, before.former_step, before.lost)
        if not path.exists() or (before is not None and not before.is_current()):
            return Former()  # another process has replaced the file, and keeps its previous version
        if path.is_dir() and not (path / DCP_INDEX).exists():
            return Former()
        if before is None and path.is_dir():  # record the folder, so that `repair` finds it
            self._record.saves[str(path)] = Save.of(path, 0)
            self._record.write(self._file)
        place = self._versions.keep(path)
        return Former(place, before.step if before is not None else 0, lost=not place)

    def _note_save(self, path: Path, former: Former, step: int | None = None) -> None:
        save = self._record_save(Save.of(path, self._run.step if step is None else step, former))
        self._run.saved(save.path, save.step)

    def _record_save(self, save: Save) -> Save:
        with self._lock:
            self._record.add(save)
            self._record.write(self._file)
        return save

    def _note_load(self, path: Path | None) -> None:
        if self._has_begun:
            return
        steps = [save.step for save in self._known() if save.path == str(path) and save.is_current()]
        self.loaded = max([*steps, self.loaded or 0])

    def _note_folder(self, path: Path | None) -> None:
        if path is not None:
            self._made[path] = self._run.step

    def _saves_at(self, path: Path | None) -> list[Save]:
        """Return this process's saves at the file `path` or inside the folder `path`."""
        if path is None or os.getpid() != self._pid:
            return []
        with self._lock:
            return [save for save in self._record.saves.values() if Path(save.path).is_relative_to(path)]

    def _known(self) -> list[Save]:
        return [save for file in self._file.parent.glob("*.json") for save in SaveRecord.read(file).saves.values()]


def _choose(texts: Sequence[str]) -> str:
    """Return, as JSON, the newest step that all ranks have saved and the newest step that any rank has saved.

    `texts`: the `Progress` of each rank, as JSON.
    """
    ranks = [Progress(**one) for one in map(json.loads, texts)]
    ranks = [replace(one, files={int(step): files for step, files in one.files.items()}) for one in ranks]
    return json.dumps([newest_of_all(ranks), max(one.newest for one in ranks)])


def _nothing(_: Sequence[str]) -> str:
    return ""


def _path_of(f: Any) -> Path | None:
    """Return the path of `f`, a path or an open local file, with links resolved; None for other streams."""
    f = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)
    if not isinstance(f, str | bytes | os.PathLike) or "://" in (path := os.fsdecode(f)):
        return None
    return Path(path).resolve()


def _first_of(*arguments: Any, **options: Any) -> Path | None:
    """Return the path in the first argument of a call; None for a stream, and for a path relative to a `dir_fd`."""
    if options.get("dir_fd") is not None:
        return None
    return _path_of(arguments[0] if arguments else next(iter(options.values()), None))


def _is_replaceable(path: Path) -> bool:
    """Return whether a new file can replace `path`: it is not a device or pipe, and its folder is writable."""
    return (path.is_file() or not path.exists()) and os.access(path.parent, os.W_OK)


def _folder_of(*_: Any, **options: Any) -> Path | None:
    """Return the folder in the arguments of a call of `torch.distributed.checkpoint`; None if it is no local folder."""
    storage = options.get("storage_writer") or options.get("storage_reader")
    return _path_of(options.get("checkpoint_id") or getattr(storage, "path", None))
