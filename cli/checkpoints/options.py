"""Options that several `hp-ext checkpoints` commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..command import JOB

F = TypeVar("F", bound=Callable[..., Any])


def place_options(function: F) -> F:
    """Add the argument PLACE and the options `-f`, `--set` and `--secret-file` to a command."""
    for decorate in (
        secret_option,
        click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change a field of the spec."),
        click.option(
            "-f", "--file", type=click.Path(), metavar="FILE", help="Use all durable tiers of this job's spec."
        ),
        click.argument("place", type=JOB, required=False, metavar="[PLACE]"),
    ):
        function = decorate(function)
    return function


def secret_option(function: F) -> F:
    """Add the option `--secret-file` to a command."""
    return click.option(
        "--secret-file",
        envvar="HPX_SECRET_FILE",
        show_envvar=True,
        type=click.Path(),
        metavar="FILE",
        help="File with the job's secret, to check signatures and MACs.",
    )(function)


def step_option(function: F) -> F:
    """Add the option `--step` to a command."""
    return click.option("--step", type=click.IntRange(min=0), help="Step of the checkpoint. Default: the newest.")(
        function
    )


def keep_options(function: F) -> F:
    """Add the options `--keep`, `--keep-every` and `--keep-step` to a command."""
    for decorate in (
        click.option("--keep-step", "keep_steps", multiple=True, type=int, metavar="S", help="Also keep step S."),
        click.option(
            "--keep-every", type=click.IntRange(min=1), metavar="N", help="Also keep steps that are multiples of N."
        ),
        click.option("--keep", type=click.IntRange(min=1), metavar="N", help="Keep the newest N complete checkpoints."),
    ):
        function = decorate(function)
    return function
