"""Seed random generators before each step, so that random numbers depend only on the job's seed, the step and the rank.

A step that is repeated after a fault draws the same numbers as the first time. Snapshots therefore need no state of
random generators.
"""

from __future__ import annotations

import hashlib
import random
import sys

import torch


def seed_of(seed: int, step: int, rank: int) -> int:
    """Return the 64-bit seed for one step of one rank, from the job's seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()[:8], "little")


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's, Python's and (if imported) numpy's global generators for this step."""
    value = seed_of(seed, step, rank)
    if torch.accelerator.is_available():
        torch.manual_seed(value)
    else:  # torch.manual_seed takes ten times as long as the generator's, because it records the caller's stack
        torch.default_generator.manual_seed(value)
    random.seed(value)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(value % (1 << 32))
