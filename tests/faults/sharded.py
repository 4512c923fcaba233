"""A training script whose state is a shard of each rank: FSDP2 on the CPU; HSDP with HPX_TEST_REPLICAS=2.

Nobody else holds a rank's shard, so after a death it comes from a tier or not at all.

HPX_TEST_FAULTS is a JSON list of `{"what": ..., "rank": R, "step": S}`. Each strikes once, at a moment of the save of
step S on rank R: `before begin`, `halfway`, `seal asked` (this process is killed; the last, once every rank has asked),
`memory server halfway` (that one is), `raises` (the copy fails), `hangs` (it never ends), `at the gate` (before it
begins, it waits until somebody writes to the FIFO that HPX_TEST_GATE names), `at the gate in step` (before the backward
pass), `memory server in step` (killed there), `memory server in save` (once that has begun), `memory server in restore`
(of step S on rank R).
"""

import hashlib
import json
import os
import select
import signal
import socket
import struct
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hyperpod_ext.runtime import Run, resilient

STEPS = int(os.environ.get("HPX_TEST_STEPS", "12"))
REPLICAS = int(os.environ.get("HPX_TEST_REPLICAS", "1"))
FAULTS = json.loads(os.environ.get("HPX_TEST_FAULTS", "[]"))
HERE = Path(os.environ["HPX_RUN_DIR"])


def strike(run: Run, step: int, *kinds: str) -> str:
    """The one of `kinds` that is due on this rank at `step`, now spent; empty: none."""
    for number, fault in enumerate(FAULTS):
        spent = HERE / f"spent-{number}-{run.rank}"
        if fault["what"] in kinds and (fault["rank"], fault["step"]) == (run.rank, step) and not spent.exists():
            spent.touch()
            return str(fault["what"])
    return ""


def wait_for(files: list[Path], seconds: float = 60.0) -> None:
    """A death is noticed within milliseconds: ranks that are not through their step by then make it again."""
    end = time.monotonic() + seconds
    while not all(file.exists() for file in files):
        assert time.monotonic() < end
        time.sleep(0.002)


def kill_memory_server() -> None:
    """The one that serves this node now, or the next where one has just been killed; it has ended on return."""
    end = time.monotonic() + 60
    while True:
        with socket.socket(socket.AF_UNIX) as line:
            if line.connect_ex(os.environ["HPX_MEMORY_SOCKET"]) == 0:
                pid = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
                ended = os.pidfd_open(pid)
                os.kill(pid, signal.SIGKILL)
                assert select.select([ended], [], [], 60)[0]
                os.close(ended)
                return
        assert time.monotonic() < end
        time.sleep(0.002)


def arm(run: Run) -> None:
    """Have the faults strike inside of the saves."""
    checkpointer = run._checkpointer
    client, stager, at = checkpointer._client, checkpointer._stager, [0]
    begin, copy, seal, load = client.begin, stager.copy, client.seal, checkpointer.load

    def begin_or_die(owner, step, *rest):
        at[0] = step
        if strike(run, step, "at the gate"):
            os.close(os.open(os.environ["HPX_TEST_GATE"], os.O_RDONLY))
        if strike(run, step, "before begin"):
            os.kill(os.getpid(), 9)
        slot = begin(owner, step, *rest)
        if strike(run, step, "memory server in save"):
            kill_memory_server()
        return slot

    def halfway(copy_half):
        what = strike(run, at[0], "halfway", "memory server halfway", "raises", "hangs")
        if what == "raises":
            raise ValueError(f"step {at[0]} cannot be copied")
        if what:
            copy_half()
        if what == "halfway":
            os.kill(os.getpid(), 9)
        if what == "memory server halfway":
            kill_memory_server()
        if what == "hangs":
            (HERE / f"hangs-{run.rank}").touch()
            threading.Event().wait()

    def copy_or_die(sources, destinations):
        if sources:
            half = len(sources) // 2
            halfway(lambda: copy(sources[:half], destinations[:half]))
        return copy(sources, destinations)

    def seal_and_die(*arguments):
        halfway(lambda: None)  # beside the next step, all may have been copied tensor by tensor
        seal(*arguments)
        (HERE / f"sealed-{at[0]}-{run.rank}").touch()
        if strike(run, at[0], "seal asked"):
            wait_for([HERE / f"sealed-{at[0]}-{rank}" for rank in range(run.world_size)])
            os.kill(os.getpid(), 9)

    def load_without_server(owner, save_id):
        if strike(run, int(save_id.rpartition("s")[2]), "memory server in restore"):
            kill_memory_server()
        return load(owner, save_id)

    client.begin, stager.copy, client.seal = begin_or_die, copy_or_die, seal_and_die
    checkpointer.load = load_without_server


def build(world_size: int) -> nn.Module:
    """The same model whatever the number of ranks. Its sizes are no multiples of any, so shards differ."""
    if REPLICAS > 1:
        mesh = init_device_mesh("cpu", (REPLICAS, world_size // REPLICAS), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 37), nn.ReLU(), nn.LayerNorm(37), nn.Linear(37, 5))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def pieces(tensor: torch.Tensor, ranks: int) -> list[int]:
    """How many numbers of `tensor` each rank has, in their order, which is that of the whole."""
    if not isinstance(tensor, DTensor):
        return [tensor.numel()] + [0] * (ranks - 1)
    rows = [len(piece) for piece in torch.arange(len(tensor)).chunk(ranks)]
    return [count * (tensor.numel() // len(tensor)) for count in rows + [0] * (ranks - len(rows))]


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Names the state of all ranks together, however it is cut: a number that JSON keeps exactly. One collective:
    with `full_tensor` of each this took nine tenths of a step."""
    mesh = next(model.parameters()).device_mesh
    group = mesh.get_group("shard") if REPLICAS > 1 else mesh.get_group()
    moments = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    tensors = [*(parameter.detach() for parameter in model.parameters()), *moments]
    sizes = [pieces(tensor, group.size()) for tensor in tensors]
    here = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    own = torch.cat([tensor.flatten()[: size[group.rank()]] for tensor, size in zip(here, sizes, strict=True)])
    sent = torch.zeros(max(sum(rank) for rank in zip(*sizes, strict=True)))
    sent[: len(own)] = own
    gathered = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(gathered, sent, group)
    together, at = hashlib.sha256(), [0] * group.size()
    for tensor in sizes:
        for rank, size in enumerate(tensor):
            together.update(gathered[rank][at[rank] : at[rank] + size].numpy().tobytes())
            at[rank] += size
    return float(int.from_bytes(together.digest()[:6], "big"))


@resilient
def train(run: Run) -> None:
    # not kept: its shards hold the process groups of one generation
    model = build(run.world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if not hasattr(run, "armed"):
        arm(run)
        run.armed = True
    step = run.restore(model=model, optimizer=optimizer)
    run.log(restored_step=step, restored_digest=digest(model, optimizer))
    for made in run.steps(STEPS):
        x = torch.randn(8, 16)
        loss = (model(x).sum(1) - x.sum(1)).square().mean()
        optimizer.zero_grad()
        if strike(run, made, "at the gate in step"):
            os.close(os.open(os.environ["HPX_TEST_GATE"], os.O_RDONLY))
        if strike(run, made, "memory server in step"):
            kill_memory_server()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / run.world_size
        dist.all_reduce(mean)
        run.log(loss=mean, digest=digest(model, optimizer))


train()
