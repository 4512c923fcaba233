"""The commands `hp-ext data ...`, for token stores on this machine. Each command has its own file."""

from __future__ import annotations

import click

from ..lazy_group import LazyGroup, Section

COMMANDS = {
    "build": "Convert a dataset to a token store, or resume the conversion.",
    "inspect": "Show a token store, a file of a dataset, or all stores in a folder.",
    "verify": "Read every byte of a token store, and compare checksums.",
}


@click.group(
    cls=LazyGroup,
    sections=[Section("Commands", __name__, COMMANDS)],
    epilog="""\b
Examples:
  hp-ext data build wiki/*.jsonl.gz --tokenizer tokenizer.json --out /nvme/data
  hp-ext data inspect /nvme/data
  hp-ext data verify /nvme/data/wiki-0123456789abcdef""",
)
def command() -> None:
    """Convert datasets to memory-mapped token stores. Each node converts a dataset once. All ranks of the node read the
    same token store, also after a fault."""
