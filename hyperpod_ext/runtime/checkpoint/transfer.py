"""State of a live rank, sent to ranks that lack it, over the process group that was just opened.

The description and the checksum travel through the job's authenticated store, the bytes through the
group; the receiver checks them before it uses one.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from hyperpod_ext.errors import CorruptSnapshotError
from hyperpod_ext.runtime.checkpoint.checkpointer import Snapshot
from hyperpod_ext.runtime.checkpoint.image import Layout, copy_all
from hyperpod_ext.runtime.checkpoint.manifest import crc64nvme
from hyperpod_ext.runtime.checkpoint.tree import Skeleton
from hyperpod_ext.runtime.rendezvous.store import PartitionedStore

_CHUNK_BYTES = 64 << 20


def send_state(
    store: PartitionedStore,
    key: str,
    receivers: list[int],
    step: int,
    skeleton: Skeleton,
    tensors: list[torch.Tensor],
    extras: dict[str, Any],
) -> None:
    """Give this rank's state to `receivers`, one after another."""
    layout = Layout.of(tensors)
    image = bytearray(layout.nbytes)
    copy_all(tensors, layout.views(image))
    header = {
        "step": step,
        "skeleton": skeleton,
        "items": layout.to_json(),
        "nbytes": layout.nbytes,
        "crc64nvme": crc64nvme(image),
        "extras": extras,
    }
    store.set(key, json.dumps(header))
    flat = torch.frombuffer(image, dtype=torch.uint8)
    for receiver in receivers:
        for chunk in torch.split(flat, _CHUNK_BYTES):
            dist.send(chunk, receiver)


def refuse_state(store: PartitionedStore, key: str, why: str) -> None:
    """Tell the receivers that nothing will come."""
    store.set(key, json.dumps({"refused": why}))


def receive_state(store: PartitionedStore, key: str, source: int) -> Snapshot:
    """The state that `source` sends to this rank.

    Raises:
        CorruptSnapshotError: what arrived is not what was sent.
    """
    header = json.loads(store.get(key))
    if "refused" in header:
        raise CorruptSnapshotError(str(header["refused"]))
    layout = Layout.from_json(header["items"], int(header["nbytes"]))
    image = bytearray(layout.nbytes)
    flat = torch.frombuffer(image, dtype=torch.uint8)
    for chunk in torch.split(flat, _CHUNK_BYTES):
        dist.recv(chunk, source)
    if crc64nvme(image) != header["crc64nvme"]:
        raise CorruptSnapshotError(f"the state of step {header['step']} from rank {source} arrived damaged")
    return Snapshot(int(header["step"]), header["skeleton"], layout.views(image), header["extras"])
