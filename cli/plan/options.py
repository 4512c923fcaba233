"""Options that `hp-ext plan` and `hp-ext simulate` share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


class Positive(click.ParamType):  # type: ignore[type-arg]  # older clicks have no argument here
    """Type of an option whose value is a number above 0. The value may be infinity only with `infinite`."""

    name = "number"

    def __init__(self, *, infinite: bool = False, suffixes: bool = False) -> None:
        self._infinite, self._suffixes = infinite, suffixes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the value as a number. With `suffixes`, a text such as `70B` stands for 70e9."""
        text, factor = str(value).strip().lower(), 1.0
        if self._suffixes and text[-1:] in _SUFFIXES:
            text, factor = text[:-1], _SUFFIXES[text[-1]]
        try:
            number = float(text) * factor
        except ValueError:
            self.fail(f"{value!r} is not a number", param, ctx)
        if not number > 0 or (math.isinf(number) and not self._infinite):
            self.fail(f"{value!r} is not a number above 0", param, ctx)
        return number


def planning_options(function: F) -> F:
    """Add the options that describe the job, its training state and its failures to a command."""
    number, share = Positive(), click.IntRange(min=1)
    for decorate in (
        click.option(
            "--repair-hours",
            type=number,
            default=0.5,
            show_default=True,
            help="Mean hours until a lost node is repaired.",
        ),
        click.option(
            "--spares",
            type=click.IntRange(min=0),
            help="Number of spare nodes.  [default: as in the spec; without a spec 2 % of the nodes]",
        ),
        click.option("--region", default="us-west-2", show_default=True, help="AWS region of the prices."),
        click.option("--usd-per-node-hour", type=number, help="US dollars per node and hour, if the price is unknown."),
        click.option(
            "--job-s", type=number, help="Seconds to start the whole job again.  [default: 600, more with many nodes]"
        ),
        click.option(
            "--node-s", type=number, help="Seconds to resume after a lost node.  [default: 30, more with many nodes]"
        ),
        click.option(
            "--process-s",
            type=number,
            help="Seconds to resume after a dead process.  [default: 5, more with many nodes]",
        ),
        click.option("--durable-gbs", type=number, help="GB/s from one node to S3 or a shared directory."),
        click.option("--disk-gbs", type=number, help="GB/s from one node to its own disk.  [default: 2]"),
        click.option("--peer-gbs", type=number, help="GB/s from one node to another node's memory."),
        click.option("--copy-gbs", type=number, help="GB/s that one worker copies into shared memory."),
        click.option(
            "--rack-nodes",
            type=share,
            default=4,
            show_default=True,
            help="Number of nodes in a rack, which fail together.",
        ),
        click.option(
            "--racks", "domains", is_flag=True, help="Store copies in another failure domain than their owner's."
        ),
        click.option(
            "--history",
            metavar="PATH",
            help="Use the failures of this run: its events.jsonl, its folder, or s3://bucket/prefix/JOB.",
        ),
        click.option(
            "--mtbf-hours",
            type=Positive(infinite=True),
            help="Mean hours between failures of one node. --rates then sets only the share of each class of failures.",
        ),
        click.option(
            "--rates", default="llama3-405b", show_default=True, help="Use the failure rates of a published run."
        ),
        click.option("--days", type=number, default=30.0, show_default=True, help="Length of the run in days."),
        click.option(
            "--trained-share",
            type=click.FloatRange(0, 1, min_open=True),
            default=1.0,
            show_default=True,
            help="Share of the state's bytes that training changes. With LoRA: adapters and their optimizer state.",
        ),
        click.option(
            "--step-seconds",
            type=number,
            help="Duration of a step in seconds.  [default: measured in --history, or 10]",
        ),
        click.option(
            "--replicated",
            is_flag=True,
            help="The state is replicated: each group of --ranks-per-copy ranks holds a whole copy.",
        ),
        click.option(
            "--ranks-per-copy", type=share, help="Ranks that hold one copy of the state.  [default: all ranks]"
        ),
        click.option("--instance-type", metavar="TYPE", help="Instance type of the nodes, as in `hp-ext instances`."),
        click.option("--workers-per-node", type=share, help="Processes on each node.  [default: one per accelerator]"),
        click.option("--nodes", type=share, help="Number of nodes of the job."),
        click.option(
            "--format",
            "format_name",
            default="mixed",
            show_default=True,
            help="Format of the state, with its bytes per parameter: weights (2), bf16 (6), fp32+bf16-adam (8), "
            "bf16+fp32-adam (10), fp32 (12), mixed (14), mixed+ema (18).",
        ),
        click.option("--state-gb", type=number, help="Size in GB of one copy of the state, over all ranks."),
        click.option("--params", type=Positive(suffixes=True), help="Number of parameters, for example 70B."),
        click.option("--model", metavar="NAME", help="Name of a known model, for example llama3-70b."),
        click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change a field of the spec."),
        click.option("-f", "--file", type=click.Path(), metavar="FILE", help="The job's spec."),
    ):
        function = decorate(function)
    return function
