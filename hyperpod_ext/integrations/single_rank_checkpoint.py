"""Checkpoint of one process's nested state in a folder or an S3 prefix.

The layout is that of a durable tier (`storage.checkpoints`) for a job of one rank: an image of the tensors, and other
values as JSON in a signed manifest, which is written last. So `dcp.load` and `hp-ext checkpoints` can read it, and
nothing is unpickled. The previous checkpoint stays until the new one is complete.
"""

from __future__ import annotations

import mmap
import secrets
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from hyperpod_ext.errors import ConflictError, CorruptSnapshotError, NotFoundError
from hyperpod_ext.runtime.snapshot.fast_copy import bytes_of
from hyperpod_ext.runtime.snapshot.image import Layout, views
from hyperpod_ext.runtime.snapshot.layout_plan import Item, Plan
from hyperpod_ext.runtime.snapshot.manifest import FORMAT, Manifest, crc64nvme, crc_text, save_id_of, sign
from hyperpod_ext.runtime.snapshot.tree import put_together, take_apart
from hyperpod_ext.runtime.storage.checkpoints import Checkpoints
from hyperpod_ext.runtime.storage.mac import UNBOUND, Expected, Reading, is_bound
from hyperpod_ext.runtime.storage.names import fence_name, fenced_generations, folder_of, image_of
from hyperpod_ext.runtime.storage.object_store import MIB, ObjectStore
from hyperpod_ext.runtime.storage.open import open_store
from hyperpod_ext.runtime.storage.retention import remove
from hyperpod_ext.runtime.storage.upload_split import files_of

_CHUNK = 256 * MIB
"""Bytes that are read and verified at a time, and the memory that a load needs in addition to the tensors."""


class SingleRankCheckpoint:
    """The checkpoint at `url`: s3://bucket/prefix, file:///path or a path.

    Args:
        job: owner of the checkpoint. One of another job is refused.
        secret: signs the checkpoint, and verifies it when it is read.

    Raises:
        ConflictError: the path is a file.
    """

    def __init__(self, url: str, *, job: str, secret: bytes) -> None:
        self._store: ObjectStore = open_store(url)
        if self._store.url.startswith("file:") and Path(url.removeprefix("file://")).is_file():
            raise ConflictError(
                f"{url} is a file, and no checkpoint of ours: those are folders",
                hint="A checkpoint by torch.save holds a pickle, which is not read here: load it with the library's "
                "own reader, and save it again.",
            )
        self._job, self._secret = job, secret
        self._checkpoints = Checkpoints(self._store, job=job, secret=secret)

    def save(self, tree: Any, step: int) -> None:
        """Write `tree`, and then delete the previous checkpoint. A symbolic link is replaced.

        Raises:
            JobFailedError: an object is neither a tensor nor JSON; the error has its path.
            StaleGenerationError: another process is writing to the same place.
            UnreachableError: the place cannot be written; the previous checkpoint is intact.
        """
        parts = take_apart(tree, torch.Tensor)
        self._unlink()  # its target is another checkpoint, and stays
        layout = Layout(parts)
        plan = layout.plan
        before = [entry.name for entry in self._store.list()]
        generation = self._checkpoints.newest_generation() + 1
        self._checkpoints.fence(generation, -1, secrets.token_hex(8))  # this invalidates the previous checkpoint
        folder = folder_of(step, generation)
        self._checkpoints.put_plan(folder, plan)
        with mmap.mmap(-1, plan.nbytes) as memory, memoryview(memory) as image:
            _fill(layout, image)
            checksum = crc_text(crc64nvme(image))
            self._store.put(f"{folder}/{image_of(0)}", image, checksum)
            macs = {image_of(0): self._checkpoints.mac(image)}
        manifest = {
            "format": FORMAT,
            "job": self._job,
            "rank": 0,
            "world_size": 1,
            "generation": generation,
            "step": step,
            "save_id": save_id_of(generation, step),
            "plan": plan.digest,
            "nbytes": plan.nbytes,
            "crc64nvme": checksum,
            "values": parts.values,
            "extras": {},
            "saved_at": time.time(),
        }
        known = {plan.digest: plan}
        self._checkpoints.commit(folder, {0: sign(manifest, self._secret)}, {0: image_of(0)}, macs, known.get)
        self._remove(before)

    def load(self) -> Any:
        """Return the saved state on the CPU, with mappings as ordered dicts. Every byte is verified.

        Raises:
            NotFoundError: there is no complete checkpoint.
            CorruptSnapshotError: it is damaged, or signed with another secret.
        """
        found = self._checkpoints.found()
        if not found:
            raise NotFoundError(f"there is no whole checkpoint in {self._store.url}")
        newest = found[0]
        checkpoint = self._checkpoints.read(newest)
        if int(checkpoint["world_size"]) != 1 or "0" not in checkpoint["ranks"]:
            raise CorruptSnapshotError(
                f"{self._store.url}: it was saved by {checkpoint['world_size']} ranks, each its part",
                hint="Read it by dcp.load, or by the job that saved it.",
            )
        manifest = checkpoint["ranks"]["0"]
        plan = self._checkpoints.read_plan(newest.folder, str(manifest["plan"]))
        if not is_bound(checkpoint):
            warnings.warn(f"{self._store.url}/{newest.folder}: {UNBOUND}", RuntimeWarning, stacklevel=2)
        tensors = self._read(newest.folder, plan, checkpoint)
        return put_together(plan.shape, tensors, manifest["values"])

    def remove(self) -> None:
        """Delete the checkpoint, its manifest first. Other files stay. A missing checkpoint is no error.

        Only the link itself is deleted if the place is a symbolic link, because its target is another checkpoint.
        """
        if self._unlink():
            return
        self._remove([entry.name for entry in self._store.list()])
        root = getattr(self._store, "root", None)
        if isinstance(root, Path) and root.is_dir() and not any(root.iterdir()):
            root.rmdir()

    def _unlink(self) -> bool:
        """Delete the symbolic link at this place; return False if there is none."""
        root = getattr(self._store, "root", None)
        if not isinstance(root, Path) or not root.is_symlink():
            return False
        root.unlink()
        return True

    def _remove(self, names: list[str]) -> None:
        remove(self._store, names)
        self._store.delete([fence_name(number) for number in fenced_generations(names)])

    def _read(self, folder: str, plan: Plan, checkpoint: Manifest) -> list[torch.Tensor]:
        """Read the tensors of an image into their own memory. Raises CorruptSnapshotError."""
        tensors = [torch.empty(item.sizes, dtype=getattr(torch, item.dtype)) for item in plan.items]
        left = [(item, bytes_of(tensor)) for item, tensor in zip(plan.items, tensors, strict=True) if item.nbytes]
        left.reverse()
        files = files_of(checkpoint, "0")
        if plan.nbytes != (nbytes := sum(file.nbytes for file in files)):
            raise CorruptSnapshotError(f"{self._store.url}/{folder}: its plan is for {plan.nbytes} bytes, not {nbytes}")
        buffer = memoryview(bytearray(min(_CHUNK, plan.nbytes)))
        for file in files:
            name, reading = f"{folder}/{file.name}", Reading(Expected.of(checkpoint, file), self._secret)
            for start in range(0, file.nbytes, _CHUNK):
                piece = buffer[: min(_CHUNK, file.nbytes - start)]
                self._store.read_into(name, piece, start)
                reading.update(piece)
                while left and _give(*left[-1], piece, file.start + start):
                    left.pop()
            if wrong := reading.wrong():
                raise CorruptSnapshotError(f"{self._store.url}/{name}: {wrong}")
        return tensors


def _fill(layout: Layout, image: memoryview) -> None:
    layout.write_frames(image)
    for target, source in zip(views(layout.plan, image), layout.locals, strict=True):
        target.copy_(source)


def _give(item: Item, tensor: memoryview, piece: memoryview, start: int) -> bool:
    """Copy a tensor's bytes from `piece`, which starts at byte `start` of the image. Return whether it is complete."""
    low, high = max(item.data, start), min(item.data + item.nbytes, start + len(piece))
    if high > low:
        tensor[low - item.data : high - item.data] = piece[low - start : high - start]
    return item.data + item.nbytes <= start + len(piece)
