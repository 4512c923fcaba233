"""The command `hp-ext data verify`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from hyperpod_ext.user_folders import expanded

from ..checkpoints.table import size
from ..command import Command, output_option
from ..needs import need_packages
from ..output import count, print_result


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext data verify /nvme/data/wiki-0123456789abcdef
  hp-ext data verify STORE --source
  hp-ext data verify STORE --drop-damaged

\b
Exits with 7 if the store is damaged, or its source has changed.""",
)
@click.argument("store", type=click.Path(), metavar="STORE")
@click.option("--source", is_flag=True, help="Also check that the dataset has not changed since it was converted.")
@click.option(
    "--drop-damaged",
    is_flag=True,
    help="Remove the first damaged segment and all later segments, so that they can be built again.",
)
@output_option()
@click.pass_context
def command(ctx: click.Context, store: str, source: bool, drop_damaged: bool, output: str) -> None:
    """Read every byte of a token store, compare checksums, and report all damage."""
    need_packages("numpy", "awscrt")
    from hyperpod_ext.errors import CorruptSegmentError
    from hyperpod_ext.runtime.data.convert.check import check, drop_from, nbytes_of_segments

    from ..checkpoints.progress import transfer

    folder = expanded(store)
    with transfer(f"reading {folder.name}", nbytes_of_segments(folder)) as on_bytes:
        found = check(folder, on_bytes=on_bytes, source=source)
    dropped: list[str] = []
    if drop_damaged and found.first_damaged is not None:
        dropped = drop_from(folder, found.first_damaged)
    result = {
        "path": str(folder),
        "state": "damaged" if found.problems else "good" if found.finished else "growing",
        "segments": found.segments,
        "nbytes": found.nbytes,
        "problems": [{"file": problem.source, "message": problem.message} for problem in found.problems],
        "source_changes": found.source_changes,
        "dropped": dropped,
    }
    print_result(result, output, _text(result))
    if found.problems or found.source_changes:
        ctx.exit(CorruptSegmentError.exit_code)


def _text(result: Mapping[str, Any]) -> str:
    lines = [f"{result['path']}: {result['state'].upper() if result['problems'] else result['state']}, "]
    lines[0] += f"{size(result['nbytes'])} in {count(result['segments'], 'segment')}"
    lines += [f"  {each['file']}: {each['message']}" for each in result["problems"]]
    lines += [f"  source: {change}" for change in result["source_changes"]]
    if result["dropped"]:
        lines.append(
            f"removed: {', '.join(result['dropped'])}; run the store's `hp-ext data build` command again "
            f"to rebuild them"
        )
    elif result["problems"]:
        lines.append(
            "`--drop-damaged` removes damaged segments; then run the store's `hp-ext data build` command again"
        )
    return "\n".join(lines)
