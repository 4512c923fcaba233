"""The command `hp-ext instances`."""

from __future__ import annotations

import click

from ..command import Command, output_option
from ..output import columns, print_result


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext instances
  hp-ext instances h100 b200
  hp-ext instances ml.p5.48xlarge -o json""",
)
@click.argument("filters", nargs=-1, metavar="[TEXT]...")
@click.option("--all", "everything", is_flag=True, help="Also list types without accelerators.")
@output_option()
def command(filters: tuple[str, ...], everything: bool, output: str) -> None:
    """List instance types whose name or accelerator contains one of the TEXTs. The output in JSON also has the CPUs and
    the memory that pods can use."""
    from dataclasses import asdict

    from hyperpod_ext.catalog.instances import instances, usable_cpus, usable_memory_mib
    from hyperpod_ext.config.files.nearest import suggest
    from hyperpod_ext.errors import NotFoundError

    known = instances()
    wanted = [text.lower() for text in filters]
    named = any(text in known for text in filters)
    found = [
        one
        for one in known.values()
        if (everything or named or one.accelerators)
        and (not wanted or any(text in f"{one.name} {one.accelerator or ''}".lower() for text in wanted))
    ]
    if not found:
        hint = suggest(filters[0], known)
        more = hint if hint.startswith("did you mean") else "`hp-ext instances --all` lists all"
        raise NotFoundError(f"no instance type matches {' or '.join(f'`{one}`' for one in filters)}", hint=more)
    listed = [
        asdict(one) | {"usable_cpus": usable_cpus(one), "usable_memory_mib": usable_memory_mib(one)} for one in found
    ]
    rows = [("TYPE", "ACCELERATORS", "GIB EACH", "CPUS", "GIB", "EFA", "DISK GB", "ARCH")]
    for one in found:
        accelerators = f"{one.accelerators} x {one.accelerator}" if one.accelerators else "-"
        each = f"{one.accelerator_memory_mib / 1024:.0f}" if one.accelerators else "-"
        efa = "?" if one.efa is None else str(one.efa)
        disks = "?" if one.nvme_gb is None else str(one.nvme_gb)
        row = (one.name, accelerators, each, str(one.vcpus), str(one.memory_gib), efa, disks, one.arch)
        rows.append(row)
    print_result(listed, output, columns(rows))
