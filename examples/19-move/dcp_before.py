"""A model in shards with asynchronous checkpoints by torch.distributed.checkpoint (DCP), for torchrun."""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard


class AppState(Stateful):
    """The application's state, which DCP saves and loads."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that is complete: DCP writes its file .metadata last."""
    return max((one.parent for one in folder.glob("step-*/.metadata")), default=None)


def main() -> None:
    dist.init_process_group("gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.Linear(args.width, args.width), nn.GELU(), nn.Linear(args.width, args.width)]
    model = nn.Sequential(*layers).to(args.device)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    group = dist.new_group(backend="gloo")  # of the thread that saves
    state, saving = AppState(model, optimizer), None
    if found := newest(Path(args.out)):
        dcp.load({"app": state}, checkpoint_id=found)

    for step in range(state.step + 1, args.steps + 1):
        torch.manual_seed(1000 * step + rank)
        x = torch.randn(args.batch_size, args.width, device=args.device)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
        if step % args.save_every == 0:
            if saving is not None:
                saving.result()
            state.step = step
            saving = dcp.async_save({"app": state}, checkpoint_id=f"{args.out}/step-{step:06}", process_group=group)
    if saving is not None:
        saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    args = parser.parse_args()
    main()
