"""What every side of the recovery benchmark trains, but ours, which runs the example itself.

Model, data, batches, optimizer and random numbers are those of examples/01-local, loaded from its own files, so a
step here makes what the same step makes there. Each process writes what it does, with the machine's monotonic clock.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

ROOT = Path(__file__).resolve().parents[2]


class Stamps:
    """A process's file of moments."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("w", buffering=1)

    def write(self, event: str, *, t: float | None = None, **fields: Any) -> None:
        entry = {"t": time.monotonic() if t is None else t, "event": event, **fields}
        self._file.write(json.dumps(entry) + "\n")


class Training:
    """The example's model, and the loss of each of its steps."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._example, self._randomness = _load_example()
        self._learn, self._held_out = self._example.read_text()

    def build(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(self._randomness.seed_of(self._args.seed, 0, -1))
        model = self._example.GPT(self._args.width, self._args.layers).to(self._args.device).train()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(self, parallel: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
        """Of this rank's share of the step's batch."""
        self._randomness.seed_step(self._args.seed, step, rank)
        places = torch.randint(len(self._learn) - self._example.CONTEXT - 1, (self._args.batch_size,))
        loss: torch.Tensor = self._example.loss_on(parallel, self._learn, places)
        return loss

    def held_out_loss(self, model: torch.nn.Module) -> float:
        with torch.no_grad():
            places = torch.arange(0, 64 * self._example.CONTEXT, self._example.CONTEXT)
            return float(self._example.loss_on(model.eval(), self._held_out, places))


def _load_example() -> tuple[Any, Any]:
    """The example's script, and how it draws random numbers. Our library stays out: its imports are not theirs."""
    stand_in: Any = types.ModuleType("hyperpod_ext.runtime")
    stand_in.Run, stand_in.resilient = object, lambda train: train
    sys.modules["hyperpod_ext.runtime"] = stand_in
    example = _load("example", ROOT / "examples" / "01-local" / "train.py")
    return example, _load("randomness", ROOT / "hyperpod_ext" / "runtime" / "state" / "seeding.py")


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


def parse(description: str | None, **more: float) -> argparse.Namespace:
    """The command line of a side; `more` are options of its own, with their defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=Path, required=True, help="where stamps and checkpoints go")
    for name in ("steps", "width", "layers", "batch-size", "seed", "save-every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    for name, default in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args()
