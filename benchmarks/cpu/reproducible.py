"""What `reproducible=True` costs: seconds of a step, beside DistributedDataParallel and FSDP2 with float32 sums.

    python benchmarks/cpu/reproducible.py [--ranks 2] [--width 1024] [--rounds 7]

Ranks are processes of this machine that talk gloo over loopback. Sides take turns; medians are shown, in brackets the
least.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hyperpod_ext.runtime.reproducible import reproducible

SIDES = ("ddp", "ddp reproducible", "fsdp2", "fsdp2 reproducible")


def build(side: str, width: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU())))
    if side.startswith("fsdp2"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if side.endswith("reproducible"):
        return reproducible(model)
    return DistributedDataParallel(model) if side == "ddp" else model


def step(side: str, model: Any, x: torch.Tensor, micro_batches: int) -> float:
    """Seconds from the first forward pass to reduced gradients."""
    model.zero_grad(set_to_none=True)
    dist.barrier()
    began = time.perf_counter()
    for index in range(micro_batches):
        if side == "ddp":
            model.require_backward_grad_sync = index == micro_batches - 1
        model(x).square().sum().backward()
    if side.endswith("reproducible"):
        model.reduce()
    return time.perf_counter() - began


def measure(rank: int, options: argparse.Namespace, folder: str, told: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", options.ranks), rank=rank, world_size=options.ranks
    )
    models = {side: build(side, options.width) for side in SIDES}
    x = torch.randn(options.batch, options.width)
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds + 1):
        for micro_batches in (1, 4):
            for side, model in models.items():
                found.setdefault((side, micro_batches), []).append(step(side, model, x, micro_batches))
    numbers = sum(parameter.numel() for parameter in models["ddp"].parameters())
    for dtype in (torch.float32, torch.int64):
        flat = torch.zeros(numbers, dtype=dtype)
        for _ in range(options.rounds + 1):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(flat)
            found.setdefault((f"all_reduce of {dtype} alone", 1), []).append(time.perf_counter() - began)
    if rank == 0:
        told.put({key: times[1:] for key, times in found.items()})  # the first is warm-up
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64, help="samples in a micro-batch")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=measure, args=(r, options, folder, told)) for r in range(options.ranks)]
        for process in ranks:
            process.start()
        found = told.get(timeout=600)
        for process in ranks:
            process.join()
    numbers = 8 * options.width * (options.width + 1)
    print(f"{numbers / 1e6:.1f} M parameters, {options.ranks} ranks, load {Path('/proc/loadavg').read_text()[:4]}\n")
    print("| side | 1 micro-batch, s | 4 micro-batches, s |\n|---|---|---|")
    for side in dict.fromkeys(side for side, _ in found):
        times = [found.get((side, n)) for n in (1, 4)]
        cells = [f"{statistics.median(each):.3f} ({min(each):.3f})" if each else "" for each in times]
        print(f"| {side} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
