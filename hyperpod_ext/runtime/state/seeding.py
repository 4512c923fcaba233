"""Random numbers as a function of (seed, step, rank) only.

A repeated step then draws the same numbers as without the fault, and no generator state must be saved or sent.
"""

from __future__ import annotations

import hashlib
import random
import sys

import torch


def seed_of(seed: int, step: int, rank: int) -> int:
    """Return the 64-bit seed for one step of one rank."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()[:8], "little")


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's, Python's and (if imported) numpy's global generators for this step."""
    value = seed_of(seed, step, rank)
    if torch.accelerator.is_available():
        torch.manual_seed(value)
    else:  # ten times as fast: manual_seed records the caller's stack for a later GPU
        torch.default_generator.manual_seed(value)
    random.seed(value)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(value % (1 << 32))
