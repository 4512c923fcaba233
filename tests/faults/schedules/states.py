"""Tiny training states whose every byte follows from which commit they are of."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

Sharing = Literal["same", "alike", "shard"]
ROWS, COLUMNS = 8, 33


@dataclass(frozen=True, slots=True)
class Kind:
    """How the ranks' states relate."""

    sharing: Sharing
    differ: bool = False
    """With `alike`: whether the parts that nobody keeps equal do differ."""


@dataclass(frozen=True, slots=True, order=True)
class Moment:
    """What a state was made by: a step of one generation of one run. A restored one keeps its first."""

    run: int
    generation: int
    step: int


START = Moment(0, 0, 0)


@functools.lru_cache(maxsize=4096)
def _arrays(moment: Moment) -> tuple[np.ndarray, np.ndarray, float]:
    generator = np.random.default_rng([moment.run, moment.generation, moment.step])
    return generator.random((ROWS, COLUMNS), np.float32), generator.random((9, 7), np.float32), generator.random()


def rows_of(rank: int, world_size: int) -> slice:
    """Rows that a rank has of a tensor sharded in its first dimension, as DTensor cuts it."""
    each = -(-ROWS // world_size)
    return slice(min(rank * each, ROWS), min((rank + 1) * each, ROWS))


def expected(moment: Moment, kind: Kind, rank: int, world_size: int) -> dict[str, Any]:
    """What a rank holds of a moment."""
    weights, statistics, rate = _arrays(moment)
    part = weights[rows_of(rank, world_size)] if kind.sharing == "shard" else weights
    state = {"weights": part, "bias": weights[0] * 2, "step": moment.step, "rate": rate}
    if kind.sharing == "alike":
        state["statistics"] = statistics + (rank if kind.differ else 0)
    return state


class Model(torch.nn.Module):
    """Weights, sharded or not, and statistics that each rank may have its own of."""

    def __init__(self, kind: Kind, rank: int, world_size: int) -> None:
        super().__init__()
        part = rows_of(rank, world_size) if kind.sharing == "shard" else slice(0, ROWS)
        local = torch.zeros(part.stop - part.start, COLUMNS)
        self.weights = torch.nn.Parameter(_sharded(local, rank, world_size) if kind.sharing == "shard" else local)
        self.bias = torch.nn.Parameter(torch.zeros(COLUMNS))
        if kind.sharing == "alike":
            self.register_buffer("statistics", torch.zeros(9, 7))

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {name: t._local_tensor if isinstance(t, DTensor) else t for name, t in named.items()}


def _sharded(local: torch.Tensor, rank: int, world_size: int) -> DTensor:
    """A DTensor as rank `rank` would have it."""
    return DTensor(local, _spec(rank, world_size), requires_grad=False)


@functools.cache
def _spec(rank: int, world_size: int) -> DTensorSpec:
    """Every rank has a mesh of its own name: torch caches by the mesh."""
    first = 100 * (rank + 1)
    mesh = DeviceMesh("cpu", torch.arange(first, first + world_size), _init_backend=False, _rank=first + rank)
    meta = TensorMeta(torch.Size((ROWS, COLUMNS)), (COLUMNS, 1), torch.float32)
    return DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)


class Progress:
    """Plain values of the state."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"step": -1, "rate": 0.0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


class Objects:
    """The objects that one rank trains."""

    def __init__(self, kind: Kind, rank: int, world_size: int) -> None:
        self.kind, self.rank, self.world_size = kind, rank, world_size
        self.model, self.progress = Model(kind, rank, world_size), Progress()

    def named(self) -> dict[str, Any]:
        return {"model": self.model, "progress": self.progress}

    def write(self, moment: Moment) -> None:
        """Train: make the state that of `moment`, in place."""
        state = expected(moment, self.kind, self.rank, self.world_size)
        with torch.no_grad():
            for name, tensor in self.model.tensors().items():
                tensor.copy_(torch.from_numpy(state[name]))
        self.progress.values = {"step": state["step"], "rate": state["rate"]}

    def spoil(self) -> None:
        """Be in the middle of a change."""
        with torch.no_grad():
            for tensor in self.model.tensors().values():
                tensor.view(-1)[::2] = -1.0

    def difference(self, moment: Moment, as_rank: int) -> str:
        """How this state differs from what `as_rank` held at `moment`; empty: not by one bit."""
        state = expected(moment, self.kind, as_rank, self.world_size)
        for name, tensor in self.model.tensors().items():
            if tensor.numpy(force=True).tobytes() != np.ascontiguousarray(state[name]).tobytes():
                return f"{name} of rank {self.rank} is not that of {moment}"
        if self.progress.values != {"step": state["step"], "rate": state["rate"]}:
            return f"rank {self.rank} has {self.progress.values}, not the values of {moment}"
        return ""
