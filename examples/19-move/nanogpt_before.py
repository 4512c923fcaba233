"""A small GPT as in nanoGPT, for torchrun: it accumulates gradients, evaluates, and saves checkpoints of its own."""

import argparse
import contextlib
import math
import os
import sysconfig
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, 64), nn.Embedding(args.block_size, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, nn.LayerNorm(64), enable_nested_tensor=False)
        self.head = nn.Linear(64, 256, bias=False)
        self.register_buffer("mask", torch.full((args.block_size,) * 2, -torch.inf).triu(1), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.tokens(x) + self.places.weight, mask=self.mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    data = np.memmap(args.data, dtype=np.uint8, mode="r")
    data = data[: len(data) * 9 // 10] if split == "train" else data[len(data) * 9 // 10 :]
    starts = torch.randint(len(data) - args.block_size - 1, (args.batch_size,)).tolist()
    xy = torch.stack([torch.from_numpy(data[i : i + args.block_size + 1].astype(np.int64)) for i in starts])
    return xy[:, :-1].to(args.device), xy[:, 1:].to(args.device)


@torch.no_grad()
def estimate_loss(model: nn.Module) -> float:
    model.eval()
    loss = torch.stack([model(*get_batch("val")) for _ in range(4)]).mean().item()
    model.train()
    return loss


def get_lr(step: int) -> float:
    if step < 5:
        return args.learning_rate * step / 5
    return args.learning_rate * (0.55 + 0.45 * math.cos(math.pi * step / args.max_iters))


def main() -> None:
    dist.init_process_group()
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    if args.device == "cuda":
        torch.cuda.set_device(local_rank)
    args.gradient_accumulation_steps //= world_size
    torch.manual_seed(1337 + rank)

    model = GPT().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler(args.device, enabled=args.dtype == "float16")
    autocast = torch.autocast(args.device, getattr(torch, args.dtype), enabled=args.dtype != "float32")
    start = 0
    if Path(args.out).exists():
        checkpoint = torch.load(args.out, map_location=args.device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["scaler"])
        start = checkpoint["step"]
    model = DistributedDataParallel(model)
    raw_model = model.module

    for step in range(start + 1, args.max_iters + 1):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        for micro_step in range(args.gradient_accumulation_steps):
            is_last = micro_step == args.gradient_accumulation_steps - 1
            with contextlib.nullcontext() if is_last else model.no_sync(), autocast:
                loss = model(*get_batch("train")) / args.gradient_accumulation_steps
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step % args.eval_interval == 0 and rank == 0:
            print(f"step {step}: val loss {estimate_loss(raw_model):.4f}")
            checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(checkpoint | {"scaler": scaler.state_dict(), "step": step}, args.out)

    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=f"{sysconfig.get_paths()['stdlib']}/typing.py", help="file of tokens: bytes")
    parser.add_argument("--out", default="checkpoint.pt")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--max-iters", type=int, default=20)
    parser.add_argument("--eval-interval", type=int, default=8)
    args = parser.parse_args()
    main()
