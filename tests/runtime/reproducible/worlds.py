"""A run of training steps by 1 to 4 processes, in stretches of different world sizes; its weights as one hash.

    python worlds.py FOLDER KIND...        KIND: replicated, plain, sharded, hybrid

The same four processes make all runs: only process groups differ.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hyperpod_ext.processes import die_with_parent
from hyperpod_ext.runtime.data import ElasticDataLoader
from hyperpod_ext.runtime.process_group.gloo.waits import wait_until_idle
from hyperpod_ext.runtime.reproducible import reproducible, seeded, sharded  # noqa: F401  (before the fork)

STEPS = int(os.environ.get("HPX_TEST_STEPS", "40"))
THIRD, TWO_THIRDS = STEPS // 3, 2 * STEPS // 3
SIZES = [int(size) for size in os.environ.get("HPX_TEST_SIZES", "1,2,3,4").split(",")]
HISTORIES = {str(size): [(size, STEPS)] for size in SIZES} | {"2-3-1": [(2, THIRD), (3, TWO_THIRDS), (1, STEPS)]}
HYBRID = {str(size): [(size, STEPS)] for size in (1, 2, 4)} | {"2-4-1": [(2, THIRD), (4, TWO_THIRDS), (1, STEPS)]}
MOST = 4


class Tied(nn.Module):
    """A language model in small: dropout, a normalised layer, and one weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(61, 24)
        self.layers = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Dropout(0.2), nn.Linear(40, 24), nn.LayerNorm(24))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.words(ids)) @ self.words.weight.T


class Words(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 397

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.arange(9) * (index + 1) + index * index) % 61


def build(kind: str, world_size: int) -> nn.Module:
    torch.manual_seed(1)
    model = Tied()
    if kind in ("sharded", "hybrid"):
        mesh = init_device_mesh("cpu", (world_size,))
        if kind == "hybrid":
            shape = (2, world_size // 2) if world_size > 2 else (1, world_size)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        fully_shard(model.layers, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def stretch(kind: str, rank: int, world_size: int, until: int, kept: Path, groups: int) -> str:
    """Train up to step `until` from what `kept` holds, and save there; the hash of the weights."""
    store = dist.FileStore(str(kept.parent / f"store-{groups}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    model = build(kind, world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = ElasticDataLoader(Words(), global_batch_size=40, micro_batch_size=4, seed=3)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    if kept.exists():
        held = torch.load(kept)
        set_state_dict(
            model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optim"], options=options
        )
        loader.load_state_dict(held["data"])
    parallel: Any = DistributedDataParallel(model) if kind == "plain" else reproducible(model)
    for step in loader.steps():
        optimizer.zero_grad()
        for ids, weight in seeded(step, seed=7):
            loss = nn.functional.cross_entropy(parallel(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
            (loss * weight * (world_size if kind == "plain" else 1)).backward()
        if kind == "plain":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:
            parallel.clip_grad_norm_(0.5)
        optimizer.step()
        loader.ack(step)
        if step.number == until:
            break
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters(), key=lambda named: named[0]):
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(whole.detach().numpy().tobytes())
    weights, optim = get_state_dict(model, optimizer, options=options)  # whole on rank 0 alone
    if rank == 0:
        torch.save({"model": weights, "optim": optim, "data": loader.state_dict()}, kept)
    dist.barrier()
    wait_until_idle()  # or torch may hang for good
    dist.destroy_process_group()
    return digest.hexdigest()


def run(rank: int, folder: Path, kinds: list[str]) -> None:
    die_with_parent(os.getppid())
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    hashes: dict[str, dict[str, str]] = {}
    groups = 0
    for kind in kinds:
        for name, history in (HYBRID if kind == "hybrid" else HISTORIES).items():
            for world_size, until in history:
                groups += 1
                if rank < world_size:
                    found = stretch(kind, rank, world_size, until, folder / f"{kind}-{name}.pt", groups)
                    if until == STEPS:
                        hashes.setdefault(kind, {})[name] = found
                gate(folder, rank, groups)  # who is not in this one waits, so that the next finds what it saved
    (folder / f"hashes-{rank}.json").write_text(json.dumps(hashes))


def gate(folder: Path, rank: int, number: int) -> None:
    """All processes have come as far."""
    store = dist.FileStore(str(folder / f"gate-{number}"), MOST)
    store.set(str(rank), "here")
    store.wait([str(other) for other in range(MOST)])


def main() -> None:
    folder, kinds = Path(sys.argv[1]), sys.argv[2:]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run, args=(rank, folder, kinds)) for rank in range(MOST)]
    for process in processes:
        process.start()
    left = {process.sentinel: process for process in processes}
    while left:
        for ended in wait(list(left)):
            process = left.pop(int(ended))
            process.join()
            if process.exitcode:
                for other in left.values():  # they would wait for it
                    other.kill()
                sys.exit(1)


if __name__ == "__main__":
    main()
