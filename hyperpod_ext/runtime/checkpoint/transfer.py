"""State of a live rank, sent to ranks that lack it, over the process group that was just opened.

The plan and the checksum travel through the job's authenticated store, the bytes through the group; the
receiver checks them before it uses one.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from hyperpod_ext.errors import CorruptSnapshotError
from hyperpod_ext.runtime.checkpoint.image import Layout, views
from hyperpod_ext.runtime.checkpoint.manifest import check_bytes, crc64nvme, crc_text
from hyperpod_ext.runtime.checkpoint.plan import read_plan
from hyperpod_ext.runtime.checkpoint.snapshot import Snapshot
from hyperpod_ext.runtime.checkpoint.staging import Stager
from hyperpod_ext.runtime.checkpoint.tree import Parts
from hyperpod_ext.runtime.rendezvous.store import PartitionedStore

_CHUNK_BYTES = 64 << 20


def send_state(
    store: PartitionedStore, key: str, receivers: list[int], step: int, parts: Parts, extras: dict[str, Any]
) -> None:
    """Give this rank's state to `receivers`, one after another."""
    layout = Layout(parts)
    plan = layout.plan
    image = bytearray(plan.nbytes)
    Stager().copy(layout.locals, views(plan, image))
    header = {
        "rank": dist.get_rank(),
        "step": step,
        "plan": plan.to_json(),
        "digest": plan.digest,
        "values": parts.values,
        "nbytes": plan.nbytes,
        "crc64nvme": crc_text(crc64nvme(image)),
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
    plan = read_plan(header["plan"], header["digest"])
    image = bytearray(plan.nbytes)
    flat = torch.frombuffer(image, dtype=torch.uint8)
    for chunk in torch.split(flat, _CHUNK_BYTES):
        dist.recv(chunk, source)
    check_bytes(header, image, f"the state of step {header['step']} from rank {source}")
    return Snapshot(int(header["step"]), plan, header["values"], lambda: memoryview(image), header["extras"])
