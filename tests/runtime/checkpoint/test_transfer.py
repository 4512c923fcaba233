"""Live state between real ranks over gloo: cut into equal parts, checked, and refused where senders disagree."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hyperpod_ext.errors import CorruptSnapshotError
from hyperpod_ext.runtime.checkpoint import live_transfer as transfer
from hyperpod_ext.runtime.checkpoint.live_transfer import (
    TransferOrder,
    buckets_of,
    receive_state,
    refuse_state,
    send_state,
)
from hyperpod_ext.runtime.state.training_state import TrainingState


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 5), st.integers(1, 20))
def test_parts_cover_every_byte_once_and_no_bucket_is_too_large(sizes: list[int], of: int, limit: int):
    parts = [buckets_of(sizes, part, of, limit) for part in range(of)]
    seen = [
        (piece.item, byte)
        for buckets in parts
        for bucket in buckets
        for piece in bucket
        for byte in range(piece.start, piece.stop)
    ]
    assert seen == [(item, byte) for item, size in enumerate(sizes) for byte in range(size)]
    lengths = [sum(p.stop - p.start for p in bucket) for buckets in parts for bucket in buckets]
    assert all(0 < length <= limit for length in lengths)
    totals = [sum(p.stop - p.start for bucket in buckets for p in bucket) for buckets in parts]
    assert max(totals) - min(totals) <= 1


class Store:
    """torch's own store of files, as `PartitionedStore` is used."""

    def __init__(self, path: Path) -> None:
        self._store = dist.FileStore(str(path), -1)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))


def trained(rank: int) -> TrainingState:
    """State of a model; rank 0 has nothing of it yet."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 70), nn.BatchNorm1d(70), nn.Linear(70, 3).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if rank:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return TrainingState({"model": model, "optimizer": optimizer})


def run_ranks(body: Callable[..., Any], folder: Path, ranks: int = 3) -> None:
    """Run `body(rank, folder)` in processes of one gloo group."""
    context = get_context("fork")
    processes = [context.Process(target=_one, args=(body, rank, folder, ranks)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        with contextlib.suppress(ValueError):
            process.kill()
    told = "\n".join(path.read_text() for path in sorted(folder.glob("error-*")))
    assert not told, told
    assert all(process.exitcode == 0 for process in processes)


def _one(body: Callable[..., Any], rank: int, folder: Path, ranks: int) -> None:
    try:
        torch.set_num_threads(1)  # a pool of threads does not survive a fork
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "group"), -1), rank=rank, world_size=ranks)
        body(rank, folder)
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
    os._exit(0)


def send_and_receive(rank: int, folder: Path) -> None:
    transfer._BUCKET_BYTES = 1000
    store, state = Store(folder / "store"), trained(rank)
    if rank:
        orders = [TransferOrder(0, rank - 1, 2)]
        send_state(store, "state-1", orders, 7, state.take().parts, {"buckets": 1})
        return
    snapshot = receive_state(store, "state-1", [1, 2])
    assert (snapshot.step, snapshot.extras) == (7, {"buckets": 1})
    state.load([snapshot])
    assert state.digest() == trained(1).digest()


def test_a_joining_node_takes_a_part_from_each_of_two(tmp_path):
    run_ranks(send_and_receive, tmp_path)


def change_in_flight(rank: int, folder: Path) -> None:
    store, state = Store(folder / "store"), trained(rank)
    if rank == 1:
        send = dist.isend

        def flip(flat: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            flat[17] ^= 1  # after its checksum was made
            return send(flat, *arguments, **options)

        dist.isend = flip
    if rank:
        return send_state(store, "state-1", [TransferOrder(0, rank - 1, 2)], 7, state.take().parts, {})
    with pytest.raises(CorruptSnapshotError, match="from rank 1 does not match its CRC64-NVME"):
        receive_state(store, "state-1", [1, 2])
    return None


def test_a_bit_that_changes_on_its_way_is_noticed(tmp_path):
    run_ranks(change_in_flight, tmp_path)


def one_refuses(rank: int, folder: Path) -> None:
    store, state = Store(folder / "store"), trained(rank)
    if rank == 1:
        refuse_state(store, "state-1", [TransferOrder(0, 0, 2)], "built anew")
    elif rank == 2:  # and does not wait for ever for somebody to take its part
        send_state(store, "state-1", [TransferOrder(0, 1, 2)], 7, state.take().parts, {})
    else:
        with pytest.raises(CorruptSnapshotError, match="rank 1: built anew"):
            receive_state(store, "state-1", [1, 2])


def test_one_that_has_nothing_to_send_stops_the_others_too(tmp_path):
    run_ranks(one_refuses, tmp_path)


def another_model(rank: int, folder: Path) -> None:
    store = Store(folder / "store")
    if rank:
        state = TrainingState({"model": nn.Linear(rank, 2)})
        return send_state(store, "state-1", [TransferOrder(0, rank - 1, 2)], 7, state.take().parts, {})
    with pytest.raises(CorruptSnapshotError, match="ranks 1 and 2 do not hold the same state"):
        receive_state(store, "state-1", [1, 2])
    return None


def test_senders_that_hold_different_things_are_named(tmp_path):
    run_ranks(another_model, tmp_path)


def test_senders_at_different_steps_are_named_though_their_tensors_are_alike():
    headers = {2: {"step": 5, "digest": "d"}, 3: {"step": 6, "digest": "d"}}
    with pytest.raises(CorruptSnapshotError, match="ranks 2 and 3 do not hold the same state"):
        transfer._agreed(headers)
