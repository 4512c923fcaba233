"""Names of files and folders in a store of checkpoints. The docstring of `checkpoints.py` shows the layout."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MANIFEST = "manifest.json"
VALUES = "__0_1.distcp"
DOCUMENT_BYTES = 256 << 20
"""Maximum size of a signed manifest, and of other files with values of all ranks: 1,000 ranks with 256 KiB each."""
NOTE_BYTES = 64 << 10
"""Maximum size of a generation's claim file, and of a node's short note, in bytes."""
_FOLDER = re.compile(r"(step-([0-9]{9,15})-g([0-9]{6,9}))(?:/|$)")
_FENCE = re.compile(r"generations/([0-9]{6,9})\.json")
NOTE = re.compile(r"(node|done|failed|left)-([0-9]{1,9})\.json")
"""Names of the notes in which nodes report their progress on a checkpoint that is not committed yet."""
_FILE = re.compile(
    rf"__[0-9]+_[0-9]+\.distcp|\.metadata|plan-[0-9a-f]{{32}}\.json|{re.escape(MANIFEST)}|{NOTE.pattern}"
)


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """A checkpoint with a manifest that is not verified yet."""

    step: int
    generation: int

    @property
    def folder(self) -> str:
        return folder_of(self.step, self.generation)


def folder_of(step: int, generation: int) -> str:
    return f"step-{step:09d}-g{generation:06d}"


def image_of(rank: int) -> str:
    """Return the file name of one rank's snapshot, in the form that DCP uses."""
    return f"__{rank}_0.distcp"


def frozen_file_of(rank: int) -> str:
    """Return the name of the file with the frozen parameters of one rank's snapshot."""
    return f"__{rank}_2.distcp"


def parse_folder(name: str) -> Found | None:
    """Return the checkpoint to which a folder, or a blob in the folder, belongs.

    Return None if the folder's name is not in the form of `folder_of`.
    """
    match = _FOLDER.match(name)
    found = Found(int(match[2]), int(match[3])) if match else None
    return found if found is not None and match is not None and found.folder == match[1] else None


def parse_file(name: str) -> tuple[Found, str] | None:
    """Return the checkpoint to which a blob belongs, and the blob's name in the checkpoint's folder.

    Return None if the blob is no file of a checkpoint.
    """
    folder, _, file = name.partition("/")
    found = parse_folder(folder)
    return (found, file) if found is not None and _FILE.fullmatch(file) else None


def fenced_generations(names: Iterable[str]) -> list[int]:
    """Return the generations that have a claim file among `names`."""
    return [int(match[1]) for name in names if (match := _FENCE.fullmatch(name)) and fence_name(int(match[1])) == name]


def plan_name(digest: str) -> str:
    """Return the file name of the layout plan with the given digest."""
    return f"plan-{digest[:32]}.json"


def fence_name(generation: int) -> str:
    """Return the name of a generation's claim file, which has the run and the step after which it began."""
    return f"generations/{generation:06d}.json"
