"""Replace a checkpoint folder of `torch.distributed.checkpoint` only when the new version of the folder is complete."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import checkpoint

from hyperpod_ext.runtime.scripts.record import DCP_INDEX

_dcp: Any = checkpoint  # typed as Any, because torch's module does not export its classes explicitly


class FolderSave:
    """One call of `torch.distributed.checkpoint.save` to the folder `path`, on one rank.

    The save writes to the folder `unfinished` next to `path`, and at the end rank 0 of the save's process group renames
    that folder to `path`. If `path` contains files that are not part of a checkpoint, the save overwrites the previous
    version in place, as under torchrun.

    Args:
        path: the folder of the checkpoint.
        options: keyword arguments of the call.
    """

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path, self._options = path, options
        self.unfinished = path.with_name(f".{path.name}.unfinished")
        self._group = options.get("process_group")
        self._alone = bool(options.get("no_dist")) or not dist.is_initialized()
        self.is_first = self._alone or dist.get_rank(self._group) == 0
        self.existed = (path / DCP_INDEX).exists()

    def run(self, save: Callable[..., Any], replace: Callable[[], None]) -> Any:
        """Call `save`, then call `replace` on the group's first rank, while the group's other ranks wait."""
        if not self._can_replace():
            if self.existed and getattr(self._options.get("storage_writer"), "overwrite", True):
                warn_of_overwriting(self.path)
            return save(**self._options)
        writer = self._options.get("storage_writer")
        try:
            result = save(**self._options | {"checkpoint_id": self.unfinished})
        finally:
            if writer is not None:
                writer.path = self.path
        if self.is_first:
            replace()
        if not self._alone:
            dist.barrier(self._group)
        if not self.is_first:
            self._replace_on_own_disk(replace)
        return result

    def _replace_on_own_disk(self, replace: Callable[[], None]) -> None:
        """Rename the unfinished folder if it is on a local disk of this node, where the first rank cannot rename it.

        The attempt to rename shows whether the first rank has already renamed the folder. A check for the folder's
        existence may give an outdated answer on a shared file system.
        """
        try:
            self.unfinished.rename(self.path)
        except FileNotFoundError:
            return
        except OSError:  # a previous version at `path` prevents the rename
            replace()

    def _can_replace(self) -> bool:
        """Return whether the save can first write to a temporary folder, as decided by the group's first rank."""
        answer = [self._is_replaceable()] if self.is_first else [False]
        if not self._alone:
            first = 0 if self._group is None else dist.get_global_rank(self._group, 0)
            dist.broadcast_object_list(answer, src=first, group=self._group)
        return answer[0]

    def _is_replaceable(self) -> bool:
        writer = self._options.get("storage_writer")
        if writer is not None and (type(writer) is not _dcp.FileSystemWriter or not writer.overwrite):
            return False
        if not self._options.get("use_collectives", True):
            return False
        if self.path.exists() and not all(map(_is_of_checkpoint, self.path.iterdir())):
            return False
        if self.unfinished.exists():
            shutil.rmtree(self.unfinished)
        return True


def warn_of_overwriting(path: Path) -> None:
    """Warn that a save overwrites the checkpoint at `path` in place."""
    sys.stderr.write(
        f"hyperpod_ext: warning: {path} has a checkpoint, which this save overwrites in place: a fault in the middle "
        "leaves files of two steps. Save each step to a folder of its own.\n"
    )


def _is_of_checkpoint(file: Path) -> bool:
    return file.name == DCP_INDEX or file.suffix == ".distcp"
