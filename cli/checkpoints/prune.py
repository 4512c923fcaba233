"""The command `hp-ext checkpoints prune`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ..command import Command, output_option
from ..needs import need_packages
from ..output import columns, count, print_result, say
from .location import CheckpointLocation, durable_places, shown
from .options import keep_options, place_options
from .table import size

if TYPE_CHECKING:
    from hyperpod_ext.runtime.storage.inventory import Inventory, InventoryEntry


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext checkpoints prune s3://bucket/prefix/my-job --keep 3 --keep-every 1000 --dry-run
  hp-ext checkpoints prune -f job.yaml --yes

\b
The newest complete checkpoint and all later checkpoints are never deleted. With -f, the retention
policy of the spec applies, unless options replace it.""",
)
@place_options
@keep_options
@click.option("--damaged", is_flag=True, help="Also delete damaged checkpoints.")
@click.option("--verify", is_flag=True, help="First verify the newest checkpoint; delete nothing if it is damaged.")
@click.option("--dry-run", is_flag=True, help="List the checkpoints that would be deleted, and stop.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@output_option()
def command(
    place: str | None,
    file: str | None,
    overrides: tuple[str, ...],
    secret_file: str | None,
    keep: int | None,
    keep_every: int | None,
    keep_steps: tuple[int, ...],
    damaged: bool,
    verify: bool,
    dry_run: bool,
    yes: bool,
    output: str,
) -> None:
    """Delete checkpoints that the retention policy does not keep, and old unfinished checkpoints."""
    chosen: list[tuple[Inventory, list[InventoryEntry]]] = []
    for each in durable_places(place, file, overrides):
        secret = each.secret(secret_file)
        inventory = each.inventory(secret)
        chosen.append((inventory, _select(each, inventory, keep, keep_every, keep_steps, damaged)))
        if verify:
            _verify_newest(inventory, secret)
    result = [
        {
            "url": f"{inventory.store.url}/{seen.found.folder}",
            "step": seen.found.step,
            "generation": seen.found.generation,
            "state": seen.state,
            "nbytes": seen.nbytes,
        }
        for inventory, gone in chosen
        for seen in gone
    ]
    if dry_run or not result:
        print_result({"deleted": [], "would_delete": result}, output, _table(chosen, "would be deleted"))
        return
    if not yes:
        say(_table(chosen, "will be deleted"))
        if not sys.stdin.isatty():
            raise click.UsageError("There is no terminal for the confirmation. Use --yes or --dry-run.")
        click.confirm("Delete them?", abort=True, err=True)
    _delete(chosen)
    print_result({"deleted": result, "would_delete": []}, output, _table(chosen, "deleted"))


def _select(
    place: CheckpointLocation,
    inventory: Inventory,
    keep: int | None,
    every: int | None,
    steps: Sequence[int],
    damaged: bool,
) -> list[InventoryEntry]:
    from hyperpod_ext.runtime.storage.inventory import select_prunable

    tier = place.tier
    if keep is None and tier is None:
        raise click.UsageError(
            "The number of checkpoints to keep is unknown. Use an option such as --keep 3, or name the spec with -f."
        )
    keep = keep if keep is not None or tier is None else tier.keep
    every = every if every is not None or tier is None else tier.keep_every_steps
    steps = [*steps, *(tier.keep_steps if tier is not None else ())]
    if not any(one.state == "complete" for one in inventory.seen):
        say(f"{place.shown}: no checkpoint is complete, so nothing is deleted")
    return select_prunable(inventory, keep or 1, every, steps, with_damaged=damaged)


def _verify_newest(inventory: Inventory, secret: bytes | None) -> None:
    from hyperpod_ext.errors import CorruptSnapshotError

    from .verify import check

    need_packages("awscrt", "cryptography")
    newest = next((one for one in inventory.seen if one.state == "complete"), None)
    if newest is not None and (problems := check(inventory, newest, secret)["problems"]):
        what = "\n".join(f"{each['file']}: {each['message']}" for each in problems)
        where = f"{shown(inventory.store.url)}/{newest.found.folder}"
        hint = "`hp-ext checkpoints verify --all` shows which checkpoints are good"
        message = f"{where}, the newest checkpoint, is damaged, so nothing was deleted\n{what}"
        raise CorruptSnapshotError(message, hint=hint)


def _delete(chosen: list[tuple[Inventory, list[InventoryEntry]]]) -> None:
    from hyperpod_ext.runtime.storage.retention import remove

    for inventory, gone in chosen:
        for seen in gone:
            remove(inventory.store, [f"{seen.found.folder}/{name}" for name in seen.files])


def _table(chosen: list[tuple[Inventory, list[InventoryEntry]]], what: str) -> str:
    rows = []
    for inventory, gone in chosen:
        for seen in gone:
            rows.append((f"step {seen.found.step}", size(seen.nbytes), seen.state, shown(inventory.store.url)))
    if not rows:
        return "nothing to delete"
    nbytes = sum(seen.nbytes for _, gone in chosen for seen in gone)
    return f"{columns(rows)}\n{count(len(rows), 'checkpoint')}, {size(nbytes)}: {what}"
