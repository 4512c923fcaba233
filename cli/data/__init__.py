"""`hp-ext data`: token stores on this machine, one file a subcommand."""

from __future__ import annotations

import click

from ..lazy_group import LazyGroup, Section

COMMANDS = {
    "build": "Convert a dataset to a token store, or go on with it.",
    "inspect": "Show a store, a dataset as it lies there, or all stores of a place.",
    "verify": "Read every byte, and compare it with its checksum.",
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
    """Datasets as memory-mapped tokens: converted once a node, read by all ranks, still there after a fault."""
