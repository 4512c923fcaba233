"""A small GPT learns to write Python from the standard library's own sources, one byte at a time.

Plain PyTorch; the lines marked (1), (2) and (3) make it survive the death of a worker.

    hp-ext create-job -f job.yaml --target local --wait
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hyperpod_ext.runtime import Run, resilient

CONTEXT = 128  # bytes the model sees at once


class Block(nn.Module):
    """Attention over what came before, then a small network, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width, heads=4) for _ in range(layers)], nn.LayerNorm(width))
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.bytes(x) + self.places.weight[: x.shape[1]]))


def read_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the standard library: nine tenths to learn from, the rest held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    split = len(text) * 9 // 10
    return text[:split], text[split:]


def loss_on(model: nn.Module, text: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Mean loss for the bytes that follow `places` in `text`."""
    window = torch.stack([text[place : place + CONTEXT + 1] for place in places.tolist()]).long()
    window = window.to(next(model.parameters()).device)
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


@resilient  # (1) called again after a fault; the processes that did not fail stay
def train(run: Run) -> None:
    learn, held_out = read_text()

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = GPT(args.width, args.layers).to(args.device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, optimizer = run.keep(build)  # (2) built once a process
    run.restore(model=model, optimizer=optimizer)  # (3) to the newest step that every rank can have
    parallel = run.data_parallel(model.train())

    for step in run.steps(args.steps):
        loss = loss_on(parallel, learn, torch.randint(len(learn) - CONTEXT - 1, (run.batch_size,)))
        optimizer.zero_grad()
        loss.backward()
        mean = loss.detach() / run.world_size
        dist.all_reduce(mean)
        optimizer.step()
        run.log(loss=mean)
        if run.rank == 0 and step % 10 == 0:  # `hp-ext logs` shows prints; run.log prints nothing
            print(f"step {step}, loss {mean.item():.4f}", flush=True)

    with torch.no_grad():
        run.log(held_out_loss=loss_on(model.eval(), held_out, torch.arange(0, 64 * CONTEXT, CONTEXT)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--width", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model")
    parser.add_argument("--device", default="cpu", help="where the model is: cpu, or cuda")
    args = parser.parse_args()
    train()
