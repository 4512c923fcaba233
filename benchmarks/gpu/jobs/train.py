"""A model that is compiled, under autocast and a gradient scaler. With `--errors` rank 2 meets two errors of CUDA.

The first leaves its context as it was: memory that is not there. After the second the context is of no use any more: an
index that is too large. Without a GPU exceptions with the same words are raised in their place.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

from hyperpod_ext.runtime import Run, resilient

RANK = 2
MEMORY_STEP, INDEX_STEP = 8, 13
WIDTH = 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def meet_errors(run: Run, step: int) -> None:
    """Each once: the first in the first generation, the second in the next."""
    if run.rank == RANK and (step, run.generation) == (MEMORY_STEP, 1):
        if args.device == "cpu":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1048576.00 GiB.")
        torch.empty(1 << 50, dtype=torch.uint8, device=args.device)
    if run.rank == RANK and (step, run.generation) == (INDEX_STEP, 2):
        if args.device == "cpu":
            raise RuntimeError("CUDA error: device-side assert triggered")
        few = torch.zeros(4, device=args.device)
        few[torch.full((4,), 1000, device=args.device)].sum().item()


@resilient
def train(run: Run) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
        model = nn.Sequential(nn.Embedding(256, WIDTH), *[Block() for _ in range(3)], nn.Linear(WIDTH, 256))
        model = model.to(args.device)
        if args.compiled:
            for block in model[1:-1]:
                block.compile(mode="reduce-overhead")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        return model, optimizer, torch.amp.GradScaler(args.device, init_scale=2.0**10, growth_interval=4)

    model, optimizer, scaler = run.keep(build)
    run.restore(model=model, optimizer=optimizer, scaler=scaler)
    parallel = run.data_parallel(model)
    for step in run.steps(args.steps):
        if args.errors:
            meet_errors(run, step)
        words = torch.randint(256, (run.batch_size, 65)).to(args.device)
        with torch.autocast(args.device, torch.float16 if args.device == "cuda" else torch.bfloat16):
            loss = nn.functional.cross_entropy(parallel(words[:, :-1]).flatten(0, 1).float(), words[:, 1:].flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        mean = loss.detach() / run.world_size
        dist.all_reduce(mean)
        scaler.step(optimizer)
        scaler.update()
        run.log(loss=mean, scale=scaler.get_scale())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--device", default="cpu", help="where the model is: cpu, or cuda")
    parser.add_argument("--compiled", action="store_true", help="compile each block, on GPUs with CUDA graphs")
    parser.add_argument("--errors", action="store_true", help="rank 2 meets two errors of CUDA")
    args = parser.parse_args()
    train()
