"""Checkpoint of one process's nested state, in a folder or an S3 prefix.

The checkpoint has the layout of a durable tier (`storage.checkpoints`) for a job with one rank: one file with the bytes
of all tensors, and a signed manifest with all other values as JSON, which is written last. `dcp.load` and
`hp-ext checkpoints` can read the checkpoint. Loading a checkpoint unpickles nothing. The previous checkpoint is deleted
only after the new checkpoint is complete.
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
"""Number of bytes that a load reads and verifies at a time, and the size of its buffer."""


class SingleRankCheckpoint:
    """The checkpoint at a URL, which need not exist yet.

    Args:
        url: s3://bucket/prefix, file:///path, or a path.
        job: name of the job that owns the checkpoint; a checkpoint of another job is refused.
        secret: key that signs the checkpoint, and verifies it when it is read.

    Raises:
        ConflictError: a file, not a folder, is at the path.
    """

    def __init__(self, url: str, *, job: str, secret: bytes) -> None:
        self._store: ObjectStore = open_store(url)
        if self._store.url.startswith("file:") and Path(url.removeprefix("file://")).is_file():
            raise ConflictError(
                f"{url} is a file, but a checkpoint of hyperpod_ext is a folder",
                hint="If torch.save wrote the file, it holds a pickle, which is not read here. Load it with "
                "Lightning's own checkpoint reader, and save it with this one.",
            )
        self._job, self._secret = job, secret
        self._checkpoints = Checkpoints(self._store, job=job, secret=secret)

    def save(self, tree: Any, step: int) -> None:
        """Write `tree` as a new checkpoint, and then delete the previous checkpoint.

        If there is a symbolic link at the checkpoint's path, a folder replaces the link.

        Args:
            tree: nested dicts and lists with tensors and JSON values.
            step: step of the checkpoint.

        Raises:
            JobFailedError: an object is neither a tensor nor JSON. The error has the object's path in `tree`.
            StaleGenerationError: another process is saving a checkpoint to the same folder or prefix.
            UnreachableError: the folder or prefix cannot be written. The previous checkpoint stays intact.
        """
        parts = take_apart(tree, torch.Tensor)
        self._unlink()  # if the path is a symbolic link, delete the link, but not its target
        layout = Layout(parts)
        plan = layout.plan
        before = [entry.name for entry in self._store.list()]
        generation = self._checkpoints.newest_generation() + 1
        self._checkpoints.fence(generation, -1, secrets.token_hex(8))  # writers of older generations get an error
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
        """Return the saved state, with tensors on the CPU and mappings as ordered dicts. Every byte is verified.

        Raises:
            NotFoundError: there is no complete checkpoint.
            CorruptSnapshotError: the checkpoint is damaged, or signed with another secret.
        """
        found = self._checkpoints.found()
        if not found:
            raise NotFoundError(f"there is no complete checkpoint in {self._store.url}")
        newest = found[0]
        checkpoint = self._checkpoints.read(newest)
        if int(checkpoint["world_size"]) != 1 or "0" not in checkpoint["ranks"]:
            raise CorruptSnapshotError(
                f"{self._store.url}: the checkpoint has the parts of {checkpoint['world_size']} ranks, but only a "
                "checkpoint of one rank can be read here",
                hint="Load the checkpoint with dcp.load, or in the job that saved it.",
            )
        manifest = checkpoint["ranks"]["0"]
        plan = self._checkpoints.read_plan(newest.folder, str(manifest["plan"]))
        if not is_bound(checkpoint):
            warnings.warn(f"{self._store.url}/{newest.folder}: {UNBOUND}", RuntimeWarning, stacklevel=2)
        tensors = self._read(newest.folder, plan, checkpoint)
        return put_together(plan.shape, tensors, manifest["values"])

    def remove(self) -> None:
        """Delete the files of the checkpoint, its manifest first. A missing checkpoint is no error.

        If there is a symbolic link at the checkpoint's path, only the link is deleted, because its target is another
        checkpoint.
        """
        if self._unlink():
            return
        self._remove([entry.name for entry in self._store.list()])
        root = getattr(self._store, "root", None)
        if isinstance(root, Path) and root.is_dir() and not any(root.iterdir()):
            root.rmdir()

    def _unlink(self) -> bool:
        """Delete a symbolic link at the checkpoint's path; return whether the path was a link."""
        root = getattr(self._store, "root", None)
        if not isinstance(root, Path) or not root.is_symlink():
            return False
        root.unlink()
        return True

    def _remove(self, names: list[str]) -> None:
        remove(self._store, names)
        self._store.delete([fence_name(number) for number in fenced_generations(names)])

    def _read(self, folder: str, plan: Plan, checkpoint: Manifest) -> list[torch.Tensor]:
        """Read the bytes of all tensors, each into its own memory, and verify them.

        Raises:
            CorruptSnapshotError: the bytes differ from the manifest.
        """
        tensors = [torch.empty(item.sizes, dtype=getattr(torch, item.dtype)) for item in plan.items]
        left = [(item, bytes_of(tensor)) for item, tensor in zip(plan.items, tensors, strict=True) if item.nbytes]
        left.reverse()
        files = files_of(checkpoint, "0")
        if plan.nbytes != (nbytes := sum(file.nbytes for file in files)):
            raise CorruptSnapshotError(
                f"{self._store.url}/{folder}: the layout plan lists {plan.nbytes} bytes, but the files have {nbytes}"
            )
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
    """Copy the part of `piece` that belongs to `tensor` into `tensor`; return whether the tensor is complete.

    Args:
        item: position of the tensor's bytes among the bytes of all tensors.
        piece: a chunk of the bytes of all tensors.
        start: position of the first byte of `piece` among the bytes of all tensors.
    """
    low, high = max(item.data, start), min(item.data + item.nbytes, start + len(piece))
    if high > low:
        tensor[low - item.data : high - item.data] = piece[low - start : high - start]
    return item.data + item.nbytes <= start + len(piece)
