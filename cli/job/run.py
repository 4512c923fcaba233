"""The command `hp-ext run`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..command import Command, output_option
from ..output import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyperpod_ext.config.files.overrides import Override
    from hyperpod_ext.jobs.plan import Plan


@click.command(
    cls=Command,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="""\b
Examples:
  hp-ext run train.py
  hp-ext run --workers 4 train.py --epochs 3
  hp-ext run --workers 4 --kill rank=1@step=20 train.py
  hp-ext run --workers 4 --compat aws train.py""",
)
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of local nodes, all on this machine.",
)
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Processes on each node.")
@click.option("--name", help="Name of the job. Default: the script's name.")
@click.option(
    "--preload/--no-preload",
    default=True,
    show_default=True,
    help="Import the packages that the script imports once per node, before workers are forked.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Stop waiting after this time; the job continues.",
)
@click.option("--kill", "kills", multiple=True, metavar="rank=R@step=S", help="Kill the process of rank R in step S.")
@click.option(
    "--compat",
    type=click.Choice(["aws"]),
    help="Let the script import AWS's packages for checkpointless training; this project implements them.",
)
@output_option("name")
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    nodes: int,
    workers: int,
    name: str | None,
    preload: bool,
    timeout: float | None,
    kills: tuple[str, ...],
    compat: str | None,
    output: str,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run an unchanged script as torchrun would, and restart all of its processes quickly after a fault.

    The script must save checkpoints, and load the newest checkpoint when it starts. A fault loses the steps since the
    last save. A script with @resilient (docs/move-your-script.md) loses no steps, nor does a script that uses AWS's
    CheckpointManager with --compat aws (docs/compat-aws.md).
    """
    from .create_job import fault_overrides, submit_and_wait

    if Path(script).suffix in (".yaml", ".yml"):
        raise click.UsageError(f"{script} is not a Python script; to submit a spec: hp-ext create-job -f {script}")
    folder, relative = _folder_of(Path(script))
    document: dict[str, Any] = {
        "name": name or _name_of(script),
        "script": relative,
        "args": arguments,
        "mode": "run",
        "nodes": nodes,
        "workers_per_node": workers,
    }
    if preload:
        document["restart"] = {"preload": _modules_of(script, compat)}
    if compat is not None:
        document |= {"compat": compat, "mode": _mode_of(script)}
    if document["mode"] == "run":
        say("mode run: the script saves and resumes by itself; a fault loses the steps since its last save")
    else:
        say("mode ours: the script has AWS's checkpoint manager; healthy processes stay, and a fault loses no step")
    submit_and_wait(_plan(document, fault_overrides(kills), folder), output, timeout, follow=True)


def _folder_of(script: Path) -> tuple[Path, str]:
    """Return the working directory of the script's processes, and the script's path relative to this directory."""
    folder, path = Path.cwd(), Path(os.path.abspath(script))  # noqa: PTH100  # links stay, as under torchrun
    if not path.is_relative_to(folder):
        folder = path.parent
        say(f"the script runs in its own folder, {folder}: its relative paths begin there")
    return folder, str(path.relative_to(folder))


def _name_of(script: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")[:63] or "script"


def _modules_of(script: str, compat: str | None) -> list[str]:
    """Return the modules to import before workers are forked. Packages that `compat` replaces are left out."""
    from hyperpod_ext.catalog.aws_terms import packages
    from hyperpod_ext.config.restart import RestartPolicy
    from hyperpod_ext.jobs.script_imports import first_imports

    replaced, passed = (packages(), {"wait_rank"}) if compat else (frozenset[str](), set[str]())
    found = [name for name in first_imports(Path(script), passed) if name.partition(".")[0] not in replaced]
    return list(dict.fromkeys([*RestartPolicy.model_fields["preload"].default, *found]))


def _mode_of(script: str) -> str:
    """Return the mode for a script with `--compat`: `ours` if the script imports a checkpoint manager of AWS, otherwise
    `run`."""
    from hyperpod_ext.jobs.rules.script_code import imports, read_all

    managers = {"CheckpointManager", "PEFTCheckpointManager"}
    names = {name.rpartition(".")[2] for code in read_all(Path(script)) for _, name in imports(code)}
    return "run" if managers.isdisjoint(names) else "ours"


def _plan(document: dict[str, Any], overrides: Sequence[Override], folder: Path) -> Plan:
    import json

    from hyperpod_ext.config.files.load import load_text
    from hyperpod_ext.config.job.job import JobConfig
    from hyperpod_ext.jobs.plan import make_plan

    job = load_text(JobConfig, json.dumps(document), "hp-ext run", overrides)
    return make_plan(job, target="local", source_dir=folder)
