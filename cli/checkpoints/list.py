"""The command `hp-ext checkpoints list`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..command import Command, output_option
from ..output import columns, print_error, print_result, say
from .location import damaged_fences, find_places, shown
from .memory import ask_memory, copying_table, snapshot_rows
from .options import place_options
from .table import age, size

if TYPE_CHECKING:
    from hyperpod_ext.errors import HyperpodExtError

    from .location import CheckpointLocation

_HEAD = ("STEP", "GENERATION", "RANKS", "SIZE", "AGE", "TIER", "STATE")


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext checkpoints list s3://bucket/prefix/my-job
  hp-ext checkpoints list -f job.yaml -o json
  hp-ext checkpoints list my-local-job

\b
States of a checkpoint: complete; unfinished (parts of some nodes are missing); damaged; abandoned
(training continued from an earlier step); uncertain (it may be abandoned, because the file that
would record this is damaged); foreign (of another job or a newer version). `list` reads only
manifests and sizes, and fails only if a place cannot be read. `verify` reads every byte, and exits
with 7 if anything is damaged.""",
)
@place_options
@output_option()
@click.pass_context
def command(
    ctx: click.Context,
    place: str | None,
    file: str | None,
    overrides: tuple[str, ...],
    secret_file: str | None,
    output: str,
) -> None:
    """List the checkpoints of each tier, newest first, and snapshots in a running local job's memory."""
    places, submission = find_places(place, file, overrides)
    memory = ask_memory(submission) if submission is not None else None
    found: list[dict[str, Any]] = []
    failure: HyperpodExtError | None = None
    from hyperpod_ext.errors import HyperpodExtError

    for each in places:
        try:
            found.append(_describe(each, each.secret(secret_file)))
        except HyperpodExtError as error:
            if len(places) == 1 and memory is None:
                raise
            found.append(_head(each) | {"error": error.to_json(), "damaged_claims": [], "checkpoints": []})
            failure = failure or error
            print_error(error, None)  # print the error and continue, because other checkpoint folders may be readable
    if submission is not None and memory is None and output == "table":
        say(f"{submission.name} is not running, so the snapshots in its memory are lost")
    print_result({"places": found, "memory": memory}, output, _table(found, memory))
    if failure is not None:
        ctx.exit(failure.exit_code)


def _head(place: CheckpointLocation) -> dict[str, Any]:
    return {"tier": place.kind, "url": place.store.url, "job": place.job, "error": None}


def _describe(place: CheckpointLocation, secret: bytes | None) -> dict[str, Any]:
    from hyperpod_ext.runtime.storage.inventory import select_prunable

    inventory = place.inventory(secret, lenient=True)
    tier = place.tier
    # a job deletes no checkpoints if a claim file is damaged
    known = tier is not None and not inventory.damaged_fences
    gone = select_prunable(inventory, tier.keep, tier.keep_every_steps, tier.keep_steps) if tier and known else []
    checkpoints = []
    for one in inventory.seen:
        checkpoints.append(
            {
                "step": one.found.step,
                "generation": one.found.generation,
                "folder": one.found.folder,
                "state": one.state,
                "detail": one.detail,
                "ranks": one.world_size,
                "nbytes": one.nbytes,
                "created_at": one.created_at,
                "kept": None if tier is None else one not in gone,
            }
        )
    return _head(place) | {
        "job": inventory.job,
        "damaged_claims": damaged_fences(inventory),
        "checkpoints": checkpoints,
    }


def _table(places: Sequence[Mapping[str, Any]], memory: Mapping[str, Any] | None) -> str:
    rows = [(*row[:-1], "", row[-1]) for row in (snapshot_rows(memory) if memory else [])]
    rows += [_row(place["tier"], one) for place in places for one in place["checkpoints"]]
    if not any(row[-2] for row in rows):
        rows = [(*row[:-2], row[-1]) for row in rows]  # leave out the column KEPT if all of its cells are empty
    head = _HEAD if rows and len(rows[0]) == len(_HEAD) else (*_HEAD[:-1], "KEPT", _HEAD[-1])
    parts = [columns([head, *rows])] if rows else []
    parts += [f"{shown(place['url'])}: none yet" for place in places if not place["checkpoints"] and not place["error"]]
    if memory is not None:
        parts += [] if any(node["snapshots"] for node in memory["nodes"]) else ["no snapshot in memory yet"]
        parts += [copying] if (copying := copying_table(memory)) else []
    return "\n\n".join(parts) or "the job has no durable tier and no snapshot in memory"


def _row(tier: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    written = one["created_at"]
    ago = age(time.time() - written if isinstance(written, int | float) else None)
    state = f"{one['state']}: {one['detail']}" if one["detail"] else one["state"]
    kept = {True: "yes", False: "no", None: ""}[one["kept"]]
    return (
        str(one["step"]),
        str(one["generation"]),
        str(one["ranks"] or "-"),
        size(one["nbytes"]),
        ago,
        tier,
        kept,
        state,
    )
