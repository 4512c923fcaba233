"""A small model learns from compressed JSONL, converted once a node while the job starts, and mapped by every rank.

    hp-ext create-job -f job.yaml --target local --wait

A second run, and a worker that is replaced, find the tokens where they are.
"""

import argparse
import gzip
import json
import os
import sysconfig
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.data import ElasticDataLoader, Packed, TensorSource, follow

CONTEXT = 128


def find_corpus(folder: Path) -> Path:
    """Your dataset in real life; here Python's own sources, written once."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "python.jsonl.gz"
    if not file.exists():
        partial = folder / f"python.{os.getpid()}.tmp"
        with partial.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as text:
            for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
                text.write(json.dumps({"text": source.read_text(errors="replace")}).encode() + b"\n")
        with suppress(FileExistsError):
            file.hardlink_to(partial)  # the first rank's; nobody sees half a file
        partial.unlink()
    return file


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


@resilient
def train(run: Run) -> None:
    # one rank of a node converts, at low priority; the others follow
    conversion = follow(find_corpus(args.data), place=args.data / "stores", segment_bytes=1 << 20)
    store = conversion.wait()
    source = TensorSource(Packed(store, CONTEXT))
    loader = ElasticDataLoader(
        source, global_batch_size=16, micro_batch_size=4, rank=run.rank, world_size=run.world_size
    )

    model, optimizer = run.keep(build)
    run.restore(model=model, optimizer=optimizer, data=loader)  # refuses another dataset than the one it began with
    parallel = run.data_parallel(model)

    for _, step in zip(run.steps(args.steps), loader.steps(), strict=False):
        optimizer.zero_grad()
        total = torch.zeros(())
        for batch, weight in step:
            tokens = batch.long()
            loss = F.cross_entropy(parallel(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) * weight
            (loss * run.world_size).backward()
            total += loss.detach()
        optimizer.step()
        loader.ack(step)
        dist.all_reduce(total)
        run.log(loss=total)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--data", type=Path, default=Path("/tmp/hyperpod-ext-12-data"), help="best on local NVMe")
    args = parser.parse_args()
    train()
