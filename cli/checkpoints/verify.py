"""The command `hp-ext checkpoints verify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..command import Command, output_option
from ..needs import need_packages
from ..output import count, print_result, say
from .location import choose, damaged_fences, durable_places, shown
from .options import place_options, step_option
from .table import size

if TYPE_CHECKING:
    from hyperpod_ext.runtime.storage.inventory import Inventory, InventoryEntry


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext checkpoints verify s3://bucket/prefix/my-job
  hp-ext checkpoints verify -f job.yaml --all --secret-file secret

\b
Exits with 7 if a checkpoint is damaged, or if a claim file is damaged. The claim file of a generation
records the first step of the generation.""",
)
@place_options
@step_option
@click.option("--all", "all_steps", is_flag=True, help="Verify every checkpoint.")
@output_option()
@click.pass_context
def command(
    ctx: click.Context,
    place: str | None,
    file: str | None,
    overrides: tuple[str, ...],
    secret_file: str | None,
    step: int | None,
    all_steps: bool,
    output: str,
) -> None:
    """Read every byte of a checkpoint, compare the checksums with the manifest, and report all damage."""
    from hyperpod_ext.errors import CorruptSnapshotError, NotFoundError

    if all_steps and step is not None:
        raise click.UsageError("--step and --all cannot be used together.")
    need_packages("awscrt", "cryptography", places=[place])
    from hyperpod_ext.runtime.snapshot.manifest import NOT_SIGNED, OTHER_SECRET

    found, fences = [], []
    for each in durable_places(place, file, overrides):
        secret = each.secret(secret_file)
        inventory = each.inventory(secret, lenient=True)
        fences += damaged_fences(inventory)
        for seen in _all(inventory) if all_steps else [choose(inventory, step)]:
            try:
                found.append(check(inventory, seen, secret))
            except NotFoundError as error:
                if not all_steps:
                    raise
                say(f"skipped: {error.message}")
    print_result({"checkpoints": found, "damaged_claims": fences}, output, "\n".join(map(_text, found)))
    if output == "table" and any(one["signature"] == "not checked" for one in found):
        say("signatures and MACs were not checked; name the job's secret with --secret-file to check them")
    messages = [each["message"] for one in found for each in one["problems"]]
    if output == "table" and any(NOT_SIGNED in message for message in messages):
        say(f"hint: {OTHER_SECRET} Check --secret-file.")
    elif output == "table" and messages and not all_steps:
        say("hint: `hp-ext checkpoints verify --all` shows which checkpoints are good")
    if fences or any(one["state"] == "damaged" for one in found):
        ctx.exit(CorruptSnapshotError.exit_code)


def _all(inventory: Inventory) -> Sequence[InventoryEntry]:
    for one in inventory.seen:
        if one.state == "unfinished":
            say(f"step {one.found.step}: skipped, because it is unfinished ({one.detail})")
    return [one for one in inventory.seen if one.state != "unfinished"]


def check(inventory: Inventory, seen: InventoryEntry, secret: bytes | None) -> dict[str, Any]:
    """Verify one checkpoint, and return the result as JSON."""
    from hyperpod_ext.runtime.storage.mac import UNBOUND
    from hyperpod_ext.runtime.storage.verify import verify

    from .progress import transfer

    with transfer(f"step {seen.found.step}", seen.nbytes) as on_bytes:
        defects = verify(inventory.store, seen, secret, on_bytes)
    bound = seen.bound
    if seen.state == "complete" and not bound:
        say(f"step {seen.found.step}: {UNBOUND}")
    return {
        "url": f"{inventory.store.url}/{seen.found.folder}",
        "step": seen.found.step,
        "generation": seen.found.generation,
        "state": "damaged" if defects else "good",
        "signature": "not checked" if secret is None else "checked",
        "macs": "none" if not bound else "not checked" if secret is None else "checked",
        "files": len(seen.files),
        "nbytes": seen.nbytes,
        "problems": [{"file": defect.file, "message": defect.message} for defect in defects],
    }


def _text(one: Mapping[str, Any]) -> str:
    head = f"{shown(one['url'])}: "
    if one["state"] == "good":
        return f"{head}good, {size(one['nbytes'])} in {count(one['files'], 'file')}"
    return "\n".join([f"{head}DAMAGED", *(f"  {each['file']}: {each['message']}" for each in one["problems"])])
