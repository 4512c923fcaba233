"""The command `hp-ext checkpoints show`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from ..command import Command, output_option
from ..output import columns, count, print_result
from .location import choose, durable_places, shown
from .options import place_options, step_option
from .table import age, ranks, size

if TYPE_CHECKING:
    from hyperpod_ext.runtime.snapshot.layout_plan import Plan
    from hyperpod_ext.runtime.storage.inventory import Inventory, InventoryEntry


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext checkpoints show s3://bucket/prefix/my-job
  hp-ext checkpoints show /fsx/checkpoints/my-job --step 1000 -o json""",
)
@place_options
@step_option
@output_option()
def command(
    place: str | None,
    file: str | None,
    overrides: tuple[str, ...],
    secret_file: str | None,
    step: int | None,
    output: str,
) -> None:
    """Show the content of one checkpoint, and how to load it without hyperpod_ext."""
    found = []
    for each in durable_places(place, file, overrides):
        secret = each.secret(secret_file)
        inventory = each.inventory(secret, lenient=step is not None)
        found.append(_describe(inventory, choose(inventory, step), secret))
    print_result({"checkpoints": found}, output, "\n\n".join(map(_text, found)))


def _describe(inventory: Inventory, seen: InventoryEntry, secret: bytes | None) -> dict[str, Any]:
    from hyperpod_ext.errors import CorruptSnapshotError
    from hyperpod_ext.runtime.storage.upload_split import files_of
    from hyperpod_ext.runtime.storage.verify import read_plans

    if not seen.digest or seen.state in ("damaged", "foreign"):
        what = "\n".join(f"{defect.file}: {defect.message}" for defect in seen.defects)
        raise CorruptSnapshotError(
            f"{shown(inventory.store.url)}/{seen.found.folder} is {seen.state}\n{what}",
            hint="Show another checkpoint with --step.",
        )
    manifest = seen.read_manifest(inventory.store, secret)
    plans = read_plans(inventory.store, seen, secret, manifest)
    return {
        "url": f"{inventory.store.url}/{seen.found.folder}",
        "job": manifest["job"],
        "step": seen.found.step,
        "generation": seen.found.generation,
        "state": seen.state,
        "detail": seen.detail,
        "created_at": seen.created_at,
        "world_size": manifest["world_size"],
        "nbytes": seen.nbytes,
        "signature": "not checked" if secret is None else "good",
        "ranks": [
            {
                "rank": int(rank),
                "file": manifest["files"][rank],
                "frozen_file": next((file.name for file in files_of(manifest, rank)[:-1]), None),
                "nbytes": one["nbytes"],
                "crc64nvme": one["crc64nvme"],
                "plan": one["plan"],
            }
            for rank, one in sorted(manifest["ranks"].items(), key=lambda item: int(item[0]))
        ],
        "holds": _holds(plans.values()),
        "plain_values": len(manifest["ranks"]["0"]["values"]),
    }


def _holds(plans: Iterable[Plan]) -> dict[str, dict[str, Any]]:
    """Return the numbers of tensors, elements and dtypes over all ranks, by the first part of the tensors' names."""
    tensors = {item.fqn: item for plan in plans for item in plan.items}
    found: dict[str, dict[str, Any]] = {}
    for name, item in tensors.items():
        group = found.setdefault(name.partition(".")[0], {"tensors": 0, "elements": 0, "dtypes": {}})
        elements = 1
        for length in item.shape:
            elements *= length
        group["tensors"] += 1
        group["elements"] += elements
        group["dtypes"][item.dtype] = group["dtypes"].get(item.dtype, 0) + 1
    return found


def _text(one: Mapping[str, Any]) -> str:
    written = one["created_at"]
    files = {file for each in one["ranks"] for file in _files(each)}
    rows = [
        ("written", "-" if written is None else f"{_date(written)}, {age(time.time() - written)} ago"),
        ("ranks", f"{one['world_size']}, in {count(len(files), 'file')}"),
        ("size", size(one["nbytes"])),
        ("signature", f"{one['signature']}{'' if one['signature'] == 'good' else ': check it with --secret-file'}"),
        ("plain values", f"{one['plain_values']:,}"),
    ]
    for name, group in one["holds"].items():
        dtypes = ", ".join(
            f"{dtype}" if len(group["dtypes"]) == 1 else f"{n} {dtype}" for dtype, n in group["dtypes"].items()
        )
        rows.append((name, f"{count(group['tensors'], 'tensor')}, {count(group['elements'], 'element')} ({dtypes})"))
    head = f"step {one['step']}, generation {one['generation']} of {one['job']}: {one['state']}"
    head += f" ({one['detail']})" if one["detail"] else ""
    return "\n\n".join([head, columns(rows), columns(_rank_rows(one)), _how_to_load(one)])


def _rank_rows(one: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return one table row for each file of the checkpoint. Ranks with identical state share a file."""
    rows: list[tuple[str, ...]] = [("RANKS", "FILE", "SIZE", "CRC64-NVME", "PLAN")]
    by_file: dict[str, list[Mapping[str, Any]]] = {}
    for each in one["ranks"]:
        by_file.setdefault(", ".join(_files(each)), []).append(each)
    for file, group in by_file.items():
        first = group[0]
        held = ranks([each["rank"] for each in group])
        rows.append((held, file, size(first["nbytes"]), first["crc64nvme"], first["plan"][:12]))
    return rows


def _files(rank: Mapping[str, Any]) -> list[str]:
    return [name for name in (rank["frozen_file"], rank["file"]) if name is not None]


def _how_to_load(one: Mapping[str, Any]) -> str:
    where = shown(one["url"])
    lines = []
    if where.startswith("s3://"):
        place, _, folder = where.rpartition("/")
        name = place.rpartition("/")[2]
        lines = ["to load it with PyTorch alone, copy it first:"]
        lines += [f"  hp-ext checkpoints copy {place} ./{name} --step {one['step']}"]
        where = f"{name}/{folder}"
    else:
        lines = ["to load it with PyTorch alone:"]
    keys = ", ".join(f'"{name}": ...' for name in one["holds"])
    lines += [
        "  import torch.distributed.checkpoint as dcp",
        f"  state = {{{keys}}}  # state dicts with the same names and shapes; dcp.load fills them in place",
        f'  dcp.load(state, checkpoint_id="{where}")',
    ]
    return "\n".join(lines)


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))
