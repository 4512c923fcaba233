"""Options that the subcommands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def place_options(function: F) -> F:
    """Add PLACE, `-f`, `--set` and `--secret-file`."""
    for decorate in (
        secret_option,
        click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change a field of the spec."),
        click.option(
            "-f", "--file", type=click.Path(), metavar="FILE", help="A job's spec, for all its durable tiers."
        ),
        click.argument("place", required=False, metavar="[PLACE]"),
    ):
        function = decorate(function)
    return function


def secret_option(function: F) -> F:
    """Add `--secret-file`."""
    return click.option(
        "--secret-file",
        envvar="HPX_SECRET_FILE",
        show_envvar=True,
        type=click.Path(),
        metavar="FILE",
        help="The job's secret, to check signatures too.",
    )(function)


def step_option(function: F) -> F:
    """Add `--step`."""
    return click.option("--step", type=click.IntRange(min=0), help="Which checkpoint. Default: the newest.")(function)


def keep_options(function: F) -> F:
    """Add `--keep`, `--keep-every` and `--keep-step`."""
    for decorate in (
        click.option("--keep-step", "keep_steps", multiple=True, type=int, metavar="S", help="Keep step S, too."),
        click.option("--keep-every", type=click.IntRange(min=1), metavar="N", help="Keep multiples of N, too."),
        click.option("--keep", type=click.IntRange(min=1), metavar="N", help="Keep the newest N complete ones."),
    ):
        function = decorate(function)
    return function
