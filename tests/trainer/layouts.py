"""Three steps of examples/20-trainer with different divisions of the model; `test_layouts.py` compares them.

    python layouts.py SHAPE RANKS TENSOR FILE

Rank 0 writes the losses, the gradient norms and the final weights.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "20-trainer"
sys.path.insert(0, str(EXAMPLE))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from model import SHAPES  # noqa: E402
from parallel import build_model, clip_gradients, make_mesh, make_optimizer  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402


def train(shape: str, ranks: int, tensor: int, file: str) -> None:
    torch.manual_seed(0)
    mesh = make_mesh("cpu", ranks, tensor)
    model = build_model(SHAPES[shape], mesh, bf16=False, recompute=False, compiled=False)
    optimizer = make_optimizer(model, 0.1)
    numbers, found = torch.Generator().manual_seed(1), []
    for _ in range(3):
        tokens = torch.randint(0, 256, (4, 33), generator=numbers).chunk(ranks // tensor)[mesh["dp"].get_local_rank()]
        loss, balance = model(tokens[:, :-1], tokens[:, 1:])
        (loss + balance).backward()
        norm = clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        found.append((mean.item(), norm.item()))
    weights = {
        name: parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        for name, parameter in model.named_parameters()
    }
    if dist.get_rank() == 0:
        torch.save({"steps": torch.tensor(found), **weights}, file)
    dist.barrier()


def main() -> None:
    shape, ranks, tensor, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    store, children = tempfile.mktemp(), []
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            dist.init_process_group("gloo", rank=rank, world_size=ranks, store=dist.FileStore(store, ranks))
            train(shape, ranks, tensor, file)
            os._exit(0)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
