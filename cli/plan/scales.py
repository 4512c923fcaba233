"""The command `hp-ext scales`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..command import Command, output_option, spec_options, spec_path
from ..output import columns, print_result, say

if TYPE_CHECKING:
    from hyperpod_ext.config.job.job import JobConfig
    from hyperpod_ext.config.scales import Scale


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext scales -f job.yaml
  hp-ext scales -f job.yaml --micro-batch-size 4 --nodes 1-16 --at-least 95
  hp-ext scales -f job.yaml -o json""",
)
@spec_options
@click.option("--micro-batch-size", type=click.IntRange(min=1), help="Samples that a rank computes at once.")
@click.option("--nodes", help="Numbers of nodes, `2,4,8` or `1-16`. Default: as in `elastic`.")
@click.option(
    "--at-least",
    type=click.FloatRange(0, 100),
    default=90.0,
    show_default=True,
    help="Minimum efficiency in percent; less efficient numbers of nodes are left out.",
)
@output_option()
def command(
    spec: str | None,
    file: str | None,
    cluster: str | None,
    overrides: tuple[str, ...],
    strict: bool,
    ignored: tuple[str, ...],
    micro_batch_size: int | None,
    nodes: str | None,
    at_least: float,
    output: str,
) -> None:
    """Show how evenly a job's global batch divides for each number of nodes, and which numbers are efficient.

    The last line of the output is the value for `elastic.sizes` in the spec, and for the operator's
    replicaDiscreteValues.
    """
    from dataclasses import asdict

    from hyperpod_ext.config.scales import discrete_values

    from ..spec import Specs

    path = spec_path(file, spec)
    job = Specs(path, cluster, overrides, strict, ignored).job
    scales = _scales(job, path, micro_batch_size, nodes)
    values = discrete_values(scales, at_least / 100)
    result = {
        "file": path,
        "at_least": at_least / 100,
        "scales": [asdict(scale) for scale in scales],
        "replicaDiscreteValues": list(values),
    }
    print_result(result, output, _table(scales, values))
    if not values:
        say(f"no number of nodes is {at_least:g} % efficient; try a smaller micro-batch, or another global_batch_size")


def _scales(job: JobConfig, path: str, micro_batch_size: int | None, nodes: str | None) -> tuple[Scale, ...]:
    """Return the division of the job's global batch for each number of nodes.

    Raises:
        ConfigError: the spec lacks a field, or the global batch is not a multiple of the micro-batch size.
    """
    from hyperpod_ext.config.elastic import BatchPolicy
    from hyperpod_ext.config.scales import plan_scales, sizes_of
    from hyperpod_ext.errors import ConfigError, Problem

    policy = job.elastic.batch if job.elastic else BatchPolicy()
    micro = micro_batch_size or policy.micro_batch_size
    missing = []
    if job.global_batch_size is None:
        missing.append(Problem("is missing", "global_batch_size", path, hint="add it to the spec, or use --set"))
    if micro is None:
        hint = "add it to the spec, or use --micro-batch-size"
        missing.append(Problem("is missing", "elastic.batch.micro_batch_size", path, hint=hint))
    if nodes is None and job.elastic is None:
        missing.append(Problem("is missing", "elastic", path, hint="add it to the spec, or use --nodes 1-16"))
    if missing or job.global_batch_size is None or micro is None:
        raise ConfigError(missing)
    sizes = _numbers(nodes) if nodes is not None else sizes_of(job.elastic) if job.elastic else ()
    try:
        return plan_scales(
            job.global_batch_size,
            micro,
            sizes,
            workers_per_node=job.workers_per_node,
            ranks_per_copy=job.parallelism.ranks_per_copy,
            policy=policy,
        )
    except ValueError as error:
        hint = "choose a micro-batch size that divides the global batch"
        raise ConfigError([Problem(str(error), "global_batch_size", path, hint=hint)]) from error


def _numbers(text: str) -> tuple[int, ...]:
    """Parse `2,4,8` or `1-16` into numbers, smallest first."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(first) < 1 or int(last or first) > 1 << 16:
            raise click.BadParameter(f"`{part}` is not a number of nodes: write 2,4,8 or 1-16", param_hint="--nodes")
        found |= set(range(int(first), int(last or first) + 1))
    if not found:
        raise click.BadParameter(f"`{text}` contains no number of nodes: write 2,4,8 or 1-16", param_hint="--nodes")
    return tuple(sorted(found))


def _table(scales: tuple[Scale, ...], values: tuple[int, ...]) -> str:
    rows = [("NODES", "RANKS", "GLOBAL BATCH", "MICRO-BATCHES", "A RANK", "GHOSTS", "EFFICIENCY", "LR")]
    for scale in scales:
        rows.append(
            (
                str(scale.nodes),
                str(scale.ranks),
                str(scale.global_batch_size),
                f"{scale.micro_batches} x {scale.micro_batch_size}",
                str(scale.micro_batches_per_rank),
                str(scale.ghosts),
                f"{scale.efficiency:.1%}",
                f"x {scale.learning_rate_factor:.3g}",
            )
        )
    return f"{columns(rows)}\n\nreplicaDiscreteValues: {list(values)}"
