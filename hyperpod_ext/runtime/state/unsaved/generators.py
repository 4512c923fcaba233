"""Read the state of a script's random generators, and check whether a generator has been seeded again."""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable
from typing import Any

import torch

KINDS = frozenset({"Generator", "RandomState", "Random"})
_TWISTS = 500
"""Maximum number of blocks of 624 numbers that a step is assumed to draw from a Mersenne twister."""


def seeded_each_step() -> set[int]:
    """Return the ids of the global generators, which `seeding.seed_step` seeds before each step."""
    numpy = sys.modules.get("numpy")
    own: list[Any] = [torch.default_generator, getattr(random.random, "__self__", None)]
    return {id(each) for each in (*own, numpy and numpy.random.rand.__self__) if each is not None}


def state_of(value: Any) -> Hashable:
    """Return the state of a random generator of torch, numpy or Python, for comparisons; None for other values."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        on_cpu = value.device.type == "cpu"
        return ("torch", value.initial_seed(), value.get_state().numpy().tobytes() if on_cpu else value.get_offset())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        _, state, _ = value.getstate()
        return ("twister", tuple(state[:-1]), state[-1])
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return _of_numpy(value.get_state(legacy=False))
    if isinstance(value, numpy.random.Generator):
        return _of_numpy(value.bit_generator.state)
    return None


def goes_on(before: Hashable, now: Hashable) -> bool:
    """Return whether a generator has reached the state `now` from the state `before` by drawing numbers only.

    The result is False if the generator was seeded between the two states: a generator that is seeded in each step
    needs no snapshot. The result is also False if the relation of the two states cannot be determined.
    """
    assert isinstance(before, tuple)
    assert isinstance(now, tuple)
    if before[0] == now[0] == "twister":
        return _is_later(before[1], now[1])
    return bool(before[:2] == now[:2])


def _of_numpy(state: dict[str, Any]) -> Hashable:
    inner = state["state"]
    if state["bit_generator"] == "MT19937":
        return ("twister", tuple(inner["key"].tolist()), int(inner["pos"]))
    stream = inner.get("inc", inner["key"].tobytes() if "key" in inner else None)
    return (state["bit_generator"], stream, repr(state))


def _is_later(before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    numpy = sys.modules.get("numpy")
    if before == now or numpy is None:
        return before == now
    twister, wanted = numpy.random.MT19937(), numpy.array(now, dtype=numpy.uint32)
    twister.state = {
        "bit_generator": "MT19937",
        "state": {"key": numpy.array(before, dtype=numpy.uint32), "pos": len(before)},
    }
    for _ in range(_TWISTS):
        twister.random_raw(len(before), output=False)
        if numpy.array_equal(twister.state["state"]["key"], wanted):
            return True
    return False
