"""The command `hp-ext checkpoints copy`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..command import Command, output_option
from ..needs import need_packages
from ..output import count, print_result, say
from .location import CheckpointLocation, choose, durable_places, open_place, shown
from .options import secret_option, step_option
from .table import size

if TYPE_CHECKING:
    from hyperpod_ext.runtime.storage.inventory import Inventory, InventoryEntry


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext checkpoints copy s3://bucket/prefix/my-job ./my-job
  hp-ext checkpoints copy /fsx/checkpoints/my-job s3://archive/my-job --all

\b
The same command resumes an interrupted copy. Files over 1 GiB are copied one at a time, through a
file in TMPDIR. The copy is signed with the secret of the job that wrote the checkpoint.""",
)
@click.argument("place")
@click.argument("dest")
@secret_option
@step_option
@click.option("--all", "all_steps", is_flag=True, help="Copy every complete checkpoint, oldest first.")
@output_option()
def command(place: str, dest: str, secret_file: str | None, step: int | None, all_steps: bool, output: str) -> None:
    """Copy checkpoints from PLACE to DEST, a directory or s3://..., and verify each byte.

    The manifest of a checkpoint is copied last, so that an unfinished copy is never restored. Checkpoints that exist in
    DEST are never overwritten.
    """
    if all_steps and step is not None:
        raise click.UsageError("--step and --all cannot be used together.")
    need_packages("awscrt", "cryptography", places=[place, dest])
    source = durable_places(place, None, ())[0]
    secret = source.secret(secret_file)
    inventory = source.inventory(secret, lenient=step is not None)
    chosen = (
        [one for one in inventory.seen[::-1] if one.state == "complete"] if all_steps else [choose(inventory, step)]
    )
    target = open_place(dest)
    if target.store.url == inventory.store.url:
        raise click.UsageError("PLACE and DEST are the same.")
    _check(inventory, chosen)
    done = [_copy(inventory, seen, target, secret) for seen in chosen]
    lines = [_text(one, target) for one in done]
    print_result({"copied": done}, output, "\n".join(lines) or "no checkpoint is complete, so nothing was copied")
    name = target.shown.rstrip("/").rpartition("/")[2]
    if done and inventory.job is not None and name != inventory.job and output == "table":
        say(f"a job finds its checkpoints only in a folder of its own name, {inventory.job}")


def _check(inventory: Inventory, chosen: list[InventoryEntry]) -> None:
    from hyperpod_ext.errors import CorruptSnapshotError

    for seen in chosen:
        if seen.state in ("damaged", "foreign"):
            raise CorruptSnapshotError(
                f"{shown(inventory.store.url)}/{seen.found.folder} is {seen.state}: {seen.detail}",
                hint="Choose another checkpoint with --step; `hp-ext checkpoints list` shows which are complete.",
            )


def _copy(
    inventory: Inventory, seen: InventoryEntry, target: CheckpointLocation, secret: bytes | None
) -> dict[str, Any]:
    from hyperpod_ext.runtime.storage.copy import copy
    from hyperpod_ext.runtime.storage.inventory import take_inventory

    from .progress import transfer

    there = take_inventory(target.store, job=inventory.job)
    with transfer(f"step {seen.found.step}", seen.nbytes) as on_bytes:
        copied = copy(inventory.store, seen, there, secret, on_bytes)
    return {
        "step": seen.found.step,
        "generation": seen.found.generation,
        "url": f"{target.store.url}/{seen.found.folder}",
        "new": copied.new,
        "files_copied": copied.files,
        "files_already_there": copied.skipped,
        "nbytes_copied": copied.nbytes,
    }


def _text(one: dict[str, Any], target: CheckpointLocation) -> str:
    where = f"step {one['step']}: {target.shown}/{one['url'].rpartition('/')[2]}"
    if not one["new"]:
        return f"{where} existed already"
    skipped = f", {one['files_already_there']} existed already" if one["files_already_there"] else ""
    return f"{where}: {count(one['files_copied'], 'file')} copied ({size(one['nbytes_copied'])}){skipped}"
