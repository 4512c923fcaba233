"""The training of examples/01-local as torchrun's users write it: DDP on gloo, DCP checkpoints in a directory.

Model, data, batches, optimizer and random numbers are those of the example, loaded from its own files, so a
step here makes what the same step makes there. Each process writes what it does, with the machine's
monotonic clock, to `rank<R>.attempt<A>.jsonl`.
"""

# ruff: noqa: E402  (the clock comes before the imports, which are what it measures)
import time

STARTED = time.monotonic()

import argparse
import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

IMPORTED = time.monotonic()

ROOT = Path(__file__).resolve().parents[2]


class Stamps:
    """This process's file of moments."""

    def __init__(self, folder: Path, rank: int) -> None:
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        self._file = (folder / f"rank{rank}.attempt{attempt}.jsonl").open("w", buffering=1)

    def write(self, event: str, *, t: float | None = None, **fields: Any) -> None:
        entry = {"t": time.monotonic() if t is None else t, "event": event, **fields}
        self._file.write(json.dumps(entry) + "\n")


def load_example() -> tuple[Any, Any]:
    """The example's script, and how it draws random numbers. Our library stays out: its imports are not torchrun's."""
    stand_in: Any = types.ModuleType("hyperpod_ext.runtime")
    stand_in.Run, stand_in.resilient = object, lambda train: train
    sys.modules["hyperpod_ext.runtime"] = stand_in
    example = _load("example", ROOT / "examples" / "01-local" / "train.py")
    return example, _load("randomness", ROOT / "hyperpod_ext" / "runtime" / "restart" / "randomness.py")


def _load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Checkpoints:
    """DCP checkpoints, one directory each; a whole one has a `.metadata`, which DCP writes last."""

    def __init__(self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._folder, self._model, self._optimizer = folder, model, optimizer

    def save(self, step: int) -> None:
        dcp.save(self._state(), checkpoint_id=self._folder / f"step{step}")

    def load_newest(self) -> int:
        """Returns the step of the checkpoint, 0 when there is none."""
        newest = max((int(whole.parent.name[4:]) for whole in self._folder.glob("step*/.metadata")), default=0)
        if newest:
            state = self._state()
            dcp.load(state, checkpoint_id=self._folder / f"step{newest}")
            model, optimizer = state["model"], state["optimizer"]
            set_state_dict(self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)
        return newest

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}


def train(args: argparse.Namespace, stamps: Stamps, rank: int) -> None:
    example, randomness = load_example()
    learn, held_out = example.read_text()
    world_size = dist.get_world_size()

    torch.manual_seed(randomness.seed_of(args.seed, 0, -1))
    model = example.GPT(args.width, args.layers)
    parallel = DistributedDataParallel(model.train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stamps.write("built")

    checkpoints = Checkpoints(args.folder / "checkpoints", parallel, optimizer)
    newest = checkpoints.load_newest()
    stamps.write("loaded", step=newest)

    for step in range(newest + 1, args.steps + 1):
        stamps.write("step_begin", step=step)
        randomness.seed_step(args.seed, step, rank)
        loss = example.loss_on(parallel, learn, torch.randint(len(learn) - example.CONTEXT - 1, (args.batch_size,)))
        optimizer.zero_grad()
        loss.backward()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        optimizer.step()
        stamps.write("step_end", step=step, loss=float(mean))
        if step % args.save_every == 0:
            checkpoints.save(step)

    with torch.no_grad():
        places = torch.arange(0, 64 * example.CONTEXT, example.CONTEXT)
        stamps.write("done", held_out_loss=float(example.loss_on(model.eval(), held_out, places)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where stamps and checkpoints go")
    for name in ("steps", "width", "layers", "batch-size", "seed", "save-every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()

    rank = int(os.environ["RANK"])
    stamps = Stamps(args.folder, rank)
    stamps.write("started", t=STARTED, pid=os.getpid())
    stamps.write("imported", t=IMPORTED)
    dist.init_process_group("gloo")
    stamps.write("group_up")
    try:
        train(args, stamps, rank)
    except Exception as error:
        stamps.write("exception", error=str(error).splitlines()[0])
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
