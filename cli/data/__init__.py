"""`hp-ext data`: token stores on this machine, one file a subcommand."""

from __future__ import annotations

import click

from ..lazy_group import LazyGroup, Section

COMMANDS = {
    "build": "Convert a dataset to a token store, or resume the conversion.",
    "inspect": "Show a store, a dataset's file, or all stores of a folder.",
    "verify": "Read every byte, and compare checksums.",
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
    """Convert datasets to memory-mapped token stores. A node converts once; all ranks read the store, also after a
    fault."""
