"""Names of what lies in a store of checkpoints, and what they say. See `durable.py` for what is where."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MANIFEST = "manifest.json"
VALUES = "__0_1.distcp"
DOCUMENT_BYTES = 256 << 20
"""Most that a signed manifest may have, or another file with values of all ranks: of a thousand with 256 KiB each."""
NOTE_BYTES = 64 << 10
"""Most that a claim of a generation may have, or a short note of a node."""
_FOLDER = re.compile(r"(step-([0-9]{9,15})-g([0-9]{6,9}))(?:/|$)")
_FENCE = re.compile(r"generations/([0-9]{6,9})\.json")
NOTE = re.compile(r"(node|done|failed|left)-([0-9]{1,9})\.json")
"""Files by which nodes report on a checkpoint that is not committed yet."""
_FILE = re.compile(
    rf"__[0-9]+_[0-9]+\.distcp|\.metadata|plan-[0-9a-f]{{32}}\.json|{re.escape(MANIFEST)}|{NOTE.pattern}"
)


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
    """The checkpoint that a folder, or a blob in it, belongs to. Only names that `folder_of` makes count."""
    match = _FOLDER.match(name)
    found = Found(int(match[2]), int(match[3])) if match else None
    return found if found is not None and match is not None and found.folder == match[1] else None


def parse_file(name: str) -> tuple[Found, str] | None:
    """The checkpoint that a blob belongs to, and its name there; None: it is no file of a checkpoint."""
    folder, _, file = name.partition("/")
    found = parse_folder(folder)
    return (found, file) if found is not None and _FILE.fullmatch(file) else None


def fenced_generations(names: Iterable[str]) -> list[int]:
    """Generations that some run has claimed."""
    return [int(match[1]) for name in names if (match := _FENCE.fullmatch(name)) and fence_name(int(match[1])) == name]


def plan_name(digest: str) -> str:
    """Name of the blob that holds a plan."""
    return f"plan-{digest[:32]}.json"


def fence_name(generation: int) -> str:
    """Name of the blob that says who began a generation, and where."""
    return f"generations/{generation:06d}.json"
