"""Names of what lies in a store of checkpoints, and what they say. See `durable.py` for what is where."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MANIFEST = "manifest.json"
VALUES = "__0_1.distcp"
DOCUMENT_BYTES = 1 << 30
"""Most that a manifest may have, or what else holds values of all ranks: those of a thousand with a megabyte each."""
_FOLDER = re.compile(r"step-(\d{9,})-g(\d{6,})(?:/|$)")
NOTE = re.compile(r"(node|done|failed|left)-(\d+)\.json")
"""What nodes tell each other of a checkpoint that is not there yet."""


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """A checkpoint that has a manifest; what that says is not verified yet."""

    step: int
    generation: int

    @property
    def folder(self) -> str:
        return folder_of(self.step, self.generation)


def folder_of(step: int, generation: int) -> str:
    return f"step-{step:09d}-g{generation:06d}"


def image_of(rank: int) -> str:
    """Name of the image of one rank, as torch.distributed.checkpoint would call its file."""
    return f"__{rank}_0.distcp"


def parse_folder(name: str) -> Found | None:
    """The checkpoint that a folder, or a blob in it, belongs to."""
    match = _FOLDER.match(name)
    return Found(int(match[1]), int(match[2])) if match else None


def fenced_generations(names: Sequence[str]) -> list[int]:
    """Generations that some run has claimed."""
    return [int(match[1]) for name in names if (match := re.fullmatch(r"generations/(\d+)\.json", name))]


def plan_name(digest: str) -> str:
    """Name of the blob that holds a plan."""
    return f"plan-{digest[:32]}.json"


def fence_name(generation: int) -> str:
    """Name of the blob that says who began a generation, and where."""
    return f"generations/{generation:06d}.json"
