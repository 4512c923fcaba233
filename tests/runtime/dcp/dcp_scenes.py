"""What the ranks of the tests do: a small model, stock torch.distributed.checkpoint, and our tiers below it."""

from __future__ import annotations

import hashlib
import itertools
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hyperpod_ext.files import write_atomically
from hyperpod_ext.runtime.dcp import TieredStorageReader, TieredStorageWriter, Tiers
from hyperpod_ext.runtime.memory_server.protocol.requests import Held

warnings.filterwarnings("ignore")


def play(scene: str, init: str, arguments: dict[str, Any]) -> Any:
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        dist.init_process_group("gloo", init, rank=int(os.environ["RANK"]), world_size=world_size)
    return globals()[scene](**arguments)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Training:
    """A model of a kind, its optimizer, and what of both is saved."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.BatchNorm1d(13), nn.Linear(13, 5))
        if kind == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.model)
        elif kind in ("fsdp", "hsdp"):
            shape = (2, dist.get_world_size() // 2) if kind == "hsdp" else (dist.get_world_size(),)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            for layer in (self.model[0], self.model[3]):
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 + seed, betas=(0.8, 0.9))
        self.step = 0

    def train(self, until: int) -> None:
        while self.step < until:
            generator = torch.Generator().manual_seed(self.step)
            loss = self.model(torch.rand(4, 7, generator=generator)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        about = {"step": self.step, "note": "é", "lines": [1, [2, 3]], "pair": (1, 2.5), "nothing": None}
        return {"model": model, "optimizer": optimizer, "about": about}

    def put(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["about"]["step"]

    def load(self, tiers: Tiers, step: int | None = None) -> None:
        state = self.state()
        state["about"] = {"step": -1, "note": "", "lines": [], "pair": (), "nothing": 1}
        dcp.load(state, storage_reader=TieredStorageReader(tiers, step))
        assert state["about"]["note"] == "é"
        assert state["about"]["lines"] == [1, [2, 3]]
        assert state["about"]["pair"] == (1, 2.5)
        assert state["about"]["nothing"] is None
        self.put(state)

    def digest(self) -> str:
        """Of all that is saved, put together from all ranks."""
        found = hashlib.sha256(str(self.step).encode())
        state = self.state()
        for name, value in sorted(flat(state).items()):
            if isinstance(value, DTensor):
                value = value.full_tensor()
            if isinstance(value, torch.Tensor):
                found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                found.update(bytes(value.detach().reshape(-1).view(torch.uint8).tolist()))  # numpy may be missing
            else:
                found.update(f"{name} {value!r}".encode())
        return found.hexdigest()


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """Leaves by the names that torch.distributed.checkpoint gives them."""
    return dict(flatten_state_dict(state)[0])


def make_tiers(policy: dict[str, Any] | None = None, **arguments: Any) -> Tiers:
    return Tiers("j", policy, **arguments)


def save(
    kind: str, steps: list[int], policy: Any = None, start_from_newest: bool = False, wait_for_upload: bool = False
) -> Any:
    """Train, save at each of the steps; returns the state's digest at each."""
    tiers = make_tiers(policy)
    training, digests = Training(kind, 0), {}
    if start_from_newest:
        training.load(tiers)
        digests["loaded"] = training.digest()
    for step in steps:
        training.train(step)
        dcp.save(training.state(), storage_writer=TieredStorageWriter(tiers, step))
        digests[str(step)] = training.digest()
    if wait_for_upload:
        assert tiers.wait_durable(100)
    tiers.close()
    return digests


def load(kind: str, step: int | None = None, policy: Any = None) -> Any:
    """Load into a model that was begun otherwise; returns the step and the state's digest."""
    tiers = make_tiers(policy)
    training = Training(kind, 1)
    latest = tiers.latest()
    training.load(tiers, step)
    tiers.close()
    return {"latest": latest, "step": training.step, "digest": training.digest()}


def round_trip(kind: str) -> None:
    tiers = make_tiers()
    assert tiers.latest() is None
    first = Training(kind, 0)
    first.train(2)
    dcp.save(first.state(), checkpoint_id="step_2", storage_writer=TieredStorageWriter(tiers))
    second = Training(kind, 1)
    assert second.digest() != first.digest()
    second.load(tiers)
    assert second.digest() == first.digest()
    assert tiers.latest() == 2
    first.train(4)
    second.train(4)
    assert second.digest() == first.digest()


def save_and_hang(marker: str) -> None:
    tiers = make_tiers()
    training = Training("plain", 0)
    for step in (5, 6):
        training.train(step)
        dcp.save(training.state(), storage_writer=TieredStorageWriter(tiers, step))
    write_atomically(Path(marker, str(rank())), training.digest())  # whoever sees it kills us
    time.sleep(60)


def save_where_one_fails(how: str, policy: Any = None) -> Any:
    """Rank 1 cannot save step 20; what was saved before and after can be loaded."""
    tiers = make_tiers(policy)
    training = Training("ddp", 0)
    training.train(10)
    before = training.digest()
    dcp.save(training.state(), storage_writer=TieredStorageWriter(tiers, 10))
    training.train(20)
    state = training.state()
    if rank() == 1:
        bad = {"budget": torch.zeros(8 << 20), "json": {1, 2}, "sparse": torch.eye(3).to_sparse()}
        state["extra"] = bad[how]
    try:
        dcp.save(state, storage_writer=TieredStorageWriter(tiers, 20))
        raised = ""
    except BaseException as error:  # CheckpointException is one
        raised = str(error)
    again = Training("ddp", 1)
    again.load(tiers)
    assert again.digest() == before
    for step in (30, 40):
        dcp.save(training.state(), storage_writer=TieredStorageWriter(tiers, step))
        assert tiers.latest() == step
    return raised


def save_torn(policy: Any = None) -> Any:
    """Steps 10 and 20 on all ranks, step 30 on all but rank 1: it dies before it has copied anything."""
    digests = {}
    tiers = make_tiers(policy)
    training = Training("fsdp", 0)
    for step in (10, 20):
        training.train(step)
        dcp.save(training.state(), storage_writer=TieredStorageWriter(tiers, step))
        digests[str(step)] = training.digest()
    training.train(30)
    writer = TieredStorageWriter(tiers, 30)
    end = tiers.end_save

    def die(save: Any, error: Any) -> None:
        del save, error
        os._exit(0)  # rank 0 has sealed, nobody else has

    tiers.end_save = die  # type: ignore[method-assign]
    if rank() == 1:
        tiers.copy = lambda save, parts: None  # type: ignore[method-assign]
    Path(os.environ["HPX_SOCKET_DIR"], f"digests{rank()}").write_text(repr(digests))
    del end
    dcp.save(training.state(), storage_writer=writer)


def save_and_flip(policy: Any = None) -> Any:
    """Steps 10 and 20; then a bit of rank 1's step 20 turns over in memory."""
    tiers = make_tiers(policy)
    training, digests = Training("fsdp", 0), {}
    for step in (10, 20):
        training.train(step)
        dcp.save(training.state(), storage_writer=TieredStorageWriter(tiers, step))
        digests[str(step)] = training.digest()
    assert tiers.wait_durable(100)
    if rank() == 1:
        held = tiers._client.open(1, "g1-s20", secret=tiers.secret, job="j")
        mapping = tiers._checkpointer._mapping
        assert mapping is not None
        item = held.plan.items[-1]
        mapping.memory[held.offset + item.data] ^= 1
    dist.barrier()
    tiers.close()
    return digests


def load_error(kind: str, step: int | None = None, policy: Any = None) -> str:
    try:
        Training(kind, 1).load(make_tiers(policy), step)
    except BaseException as error:
        return str(error)
    raise AssertionError("it loaded")


def save_in_background(steps: list[int]) -> Any:
    tiers = make_tiers()
    training, digests, future = Training("fsdp", 0), {}, None
    writer = TieredStorageWriter(tiers)
    for step in steps:
        training.train(step)
        if future is not None:
            future.result()
        digests[str(step)] = training.digest()
        future = dcp.async_save(
            training.state(),
            checkpoint_id=f"step_{step}",
            storage_writer=writer,
            process_group=tiers.process_group,
        )
        training.train(step + 1)  # what is saved does not change any more
    assert future is not None
    future.result()
    tiers.close()
    return digests


def quick_error() -> str:
    """What a second training of the same name is told."""
    import hyperpod_ext.runtime.control_plane.node_memory_client as module

    module._QUIET_S = 0.2
    return load_error("plain")


def save_and_leave(policy: Any, idle_exit_s: float) -> None:
    tiers = make_tiers(policy, idle_exit_s=idle_exit_s)
    training = Training("plain", 0)
    for step in (1, 2):
        training.train(step)
        dcp.save(training.state(), storage_writer=TieredStorageWriter(tiers, step))


def save_with_cached_plans(steps: list[int]) -> Any:
    """torch's own plan caching: a plan that has not changed is not sent again."""
    tiers = make_tiers()
    training, digests = Training("fsdp", 0), {}
    for step in steps:
        training.train(step)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(training.state(), storage_writer=TieredStorageWriter(tiers, step), planner=planner)
        digests[str(step)] = training.digest()
    tiers.close()
    return digests


def save_whole(policy: Any, path: str) -> None:
    """A sharded state into the tiers, and the same put together as one file of torch.save."""
    tiers = make_tiers(policy)
    training = Training("fsdp", 0)
    training.train(3)
    state = training.state()
    dcp.save(state, storage_writer=TieredStorageWriter(tiers, 3))
    full = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in flat(state).items()}
    if rank() == 0:
        torch.save(full, path)
    assert tiers.wait_durable(100)


def held() -> list[int]:
    """Ranks that the memory server holds snapshots of."""
    tiers = make_tiers()
    return sorted({int(summary["rank"]) for summary in tiers._client.ask(Held()).snapshots})


def save_dtensors(two_dimensions: bool) -> None:
    """Tensors of a known content, cut in every way that a mesh allows."""
    tiers = make_tiers()
    dcp.save(_dtensors(1.0, two_dimensions), storage_writer=TieredStorageWriter(tiers, 1))


def load_dtensors(two_dimensions: bool) -> None:
    state = _dtensors(0.0, two_dimensions)
    dcp.load(state, storage_reader=TieredStorageReader(make_tiers()))
    for name, tensor in _dtensors(1.0, two_dimensions).items():
        assert torch.equal(state[name].full_tensor(), tensor.full_tensor()), name


def _dtensors(factor: float, two_dimensions: bool) -> dict[str, DTensor]:
    shape = (2, dist.get_world_size() // 2) if two_dimensions else (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape)
    ways = itertools.product([Shard(0), Shard(1), Replicate()], repeat=2)
    full = factor * torch.arange(1.0, 36.0).view(7, 5)
    return {str(way): distribute_tensor(full, mesh, list(way[: len(shape)])) for way in ways}
