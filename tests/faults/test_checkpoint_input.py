"""What cannot be saved or must not be restored is refused by name, and the last good checkpoint stays loadable."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import served
import small_job
import torch
from durable_place import Directory, folder_of
from served import SECRET
from small_disk import fill, mounted
from small_job import MEMORY, PEER, relaunched, trained
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from hyperpod_ext.errors import JobFailedError, MemoryTierFullError
from hyperpod_ext.runtime.checkpoint import checkpointer as checkpointer_module
from hyperpod_ext.runtime.snapshot.manifest import sign


def rewritten(data: bytes, **changes: Any) -> bytes:
    """A checkpoint's manifest with other fields, signed anew with the job's own secret."""
    return json.dumps(sign({**json.loads(data), **changes}, SECRET)).encode()


# --- what cannot be saved -------------------------------------------------------------------------


def test_state_that_outgrows_the_budget_is_refused_and_the_last_good_step_is_restored(make_job):
    """The optimizer's state, say: the budget of 1 MiB took the first steps."""
    job = trained(make_job({**MEMORY, "budget_mib": 1}, nodes=1), 3)
    rank = job.ranks[0]
    rank.optimizer.param_groups[0]["grown"] = torch.zeros(1 << 20)
    rank.make_step(4)
    with pytest.raises(MemoryTierFullError, match=r"rank 0 \(2 slots of 4\.\d MiB, own\) needs 8\.\d MiB"):
        rank.commit(4)
    assert job.servers[0].held_steps(0) == [2, 3]
    assert job.resume() == 3
    job.assert_holds(3)
    job.train(5)
    assert job.resume() == 5


def test_state_that_never_fits_is_refused_before_anything_is_written(make_job):
    job = make_job({**MEMORY, "budget_mib": 1}, nodes=1)
    assert job.resume() == 0
    job.ranks[0].optimizer.param_groups[0]["large"] = torch.zeros(1 << 20)
    with pytest.raises(MemoryTierFullError, match="its budget is 1 MiB a node"):
        job.train(1)
    assert job.servers[0].held_steps(0) == []


def test_a_budget_without_room_for_replicas_costs_the_copies_alone(make_job):
    """Own snapshots come first; what cannot be taken from the other node is refused there, and said here."""
    job = trained(make_job({**MEMORY, "budget_mib": 1}, PEER, nodes=2), 2)
    for rank in job.ranks.values():
        rank.optimizer.param_groups[0]["grown"] = torch.zeros(33_000)  # 4 slots and no replica fit
        rank.make_step(3)
        rank.commit(3)
    job.settle()
    told = [next(c for c in s.ask("status")["copying"] if c["tier"] == "peer") for s in job.servers.values()]
    assert all(one["failed"] for one in told)
    assert all("in the memory tier; its budget is 1 MiB a node" in one["last_error"] for one in told)
    assert all(server.held_steps(node)[-1] == 3 for node, server in job.servers.items())


class Thing:
    """An object of the user's, whose state is what a test says."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (lambda: {"a": {"rate": lambda: 1}}, r"thing\.a\.rate"),
        (lambda: {"a": [1, {"b": object()}]}, r"thing\.a\.1\.b"),
        (lambda: {"when": torch.ones(3).to_sparse()}, r"thing\.when is a tensor of type torch\.float32 and layout"),
        (lambda: {"q": torch._empty_affine_quantized([2], scale=1.0, dtype=torch.qint8)}, r"thing\.q is a tensor of"),
        (lambda: {"raw": bytearray(b"bytes")}, r"thing\.raw"),
        (
            lambda: {"w": TwoTensor(torch.ones(2), torch.ones(2))},
            r"thing\.w is a TwoTensor, which is made of other tensors",
        ),
    ],
    ids=["a function", "an object", "sparse", "quantised", "bytes", "made of others"],
)
def test_a_leaf_that_cannot_be_stored_is_named_and_the_last_good_step_is_restored(make_job, state, words):
    job = trained(make_job(MEMORY, nodes=1), 3)
    rank = job.ranks[0]
    rank.restore_also(thing=Thing(state()))
    rank.make_step(4)
    with pytest.raises(JobFailedError, match=words):
        rank.commit(4)
    assert job.resume() == 3
    job.assert_holds(3)


# --- what must not be restored --------------------------------------------------------------------


def test_jobs_of_other_names_share_a_place_without_seeing_each_other(make_job, place, monkeypatch):
    trained(make_job(MEMORY, place.tier(), nodes=1), 4)
    for module in (served, small_job):
        monkeypatch.setattr(module, "JOB", "other")
    other = trained(make_job(MEMORY, place.tier(), nodes=1), 2)
    assert relaunched(make_job, other).resume() == 2


@pytest.mark.parametrize("clock", [-1e12, 0.0, 4e12], ids=["long ago", "1970", "far ahead"])
def test_a_clock_that_jumps_changes_nothing(make_job, place, monkeypatch, clock):
    """The newest step was saved, and its checkpoint written, at a time that makes no sense."""
    job = trained(make_job(MEMORY, PEER, place.tier()), 3)
    monkeypatch.setattr(checkpointer_module, "time", SimpleNamespace(time=lambda: clock, monotonic=time.monotonic))
    job.train(4)
    assert job.resume() == 4
    job.assert_holds(4)
    name = f"{folder_of(place, 4)}/manifest.json"
    place.write(name, rewritten(place.read(name), created_at=clock))
    job = relaunched(make_job, job)
    assert job.resume() == 4
    job.assert_holds(4)
    job.train(8)
    kept = {found for found in place.names() if found.endswith("/manifest.json")}
    assert sorted(int(name[5:14]) for name in kept) == [4, 6, 8]  # by step, not by date


# --- no room --------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Directory]:
    """A file system of its own with room for a few checkpoints."""
    with mounted(tmp_path / "disk", "256k") as disk:
        yield Directory(disk)


def test_a_full_disk_is_said_and_the_checkpoints_on_it_stay_loadable(make_job, small_disk):
    job = trained(make_job(MEMORY, small_disk.tier(keep=2), nodes=1), 4)
    fill(small_disk.base, but=8192)
    job.train(6)
    told = job.servers[0].ask("status")["copying"][0]
    assert told["durable_step"] == 4
    assert "No space left on device" in told["last_error"]
    assert not [name for name in small_disk.names() if name.startswith("step-000000006") and "manifest" in name]
    (small_disk.base / "others").unlink()
    job.train(8)
    assert job.servers[0].ask("status")["copying"][0]["durable_step"] == 8
    assert job.resume() == 8
    fill(small_disk.base)
    job = relaunched(make_job, job)
    assert job.resume() == 8
    job.assert_holds(8)


def test_a_budget_that_took_a_job_takes_its_relaunch(make_job, place):
    """What is fetched needs memory beside the slots only until it is restored."""
    job = trained(make_job({**MEMORY, "budget_mib": 1}, place.tier(), nodes=1, kind="large"), 4)
    job = relaunched(make_job, job)
    assert job.resume() == 4
    job.assert_holds(4)
    job.train(6)
    job.assert_holds(6)


def test_a_module_that_is_not_the_one_that_was_saved_is_said(make_job, place):
    job = relaunched(make_job, trained(make_job(MEMORY, place.tier(), nodes=1, kind="same"), 2))
    build = job.build
    job.build = lambda number: nn.Sequential(*build(number), nn.Linear(3, 3))
    with pytest.raises(JobFailedError, match=r"cannot be loaded: .* is not in the snapshot"):
        job.resume()
