"""The command `hp-ext validate`."""

from __future__ import annotations

import click

from ..command import TARGET, Command, output_option, spec_options, spec_path
from ..output import count, print_result, say


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext validate job.yaml
  hp-ext validate -f job.yaml --target local --set nodes=4 -o json
  hp-ext validate job.yaml --target hyperpod-eks --strict --ignore HPX134
  hp-ext validate job.yaml --target hyperpod-eks --templates my-templates
  hp-ext validate --templates my-templates""",
)
@spec_options
@click.option("--target", type=TARGET, help="Also check that this target can run the job.")
@click.option(
    "--templates",
    type=click.Path(),
    metavar="DIR",
    help="Also check the templates in this folder; with --target, also render them.",
)
@output_option()
def command(
    spec: str | None,
    file: str | None,
    cluster: str | None,
    overrides: tuple[str, ...],
    strict: bool,
    ignored: tuple[str, ...],
    target: str | None,
    templates: str | None,
    output: str,
) -> None:
    """Check a job's spec. Reports all mistakes at once, each with its line and a correction."""
    from ..spec import Specs, ranks_of

    if templates is not None and spec is None and file is None and target is None:
        _templates_alone(templates, output)
        return
    path = spec_path(file, spec)
    specs = Specs(path, cluster, overrides, strict, ignored, target)
    specs.check(target)
    if templates is not None:
        specs.check_templates(target, templates)
    warnings = specs.warnings(target)
    for warning in warnings:
        say(f"warning: {warning}")
    job = specs.job
    result: dict[str, object] = {
        "valid": True,
        "file": path,
        "name": job.name,
        "world_size": job.world_size,
        "target": target,
    }
    result["warnings"] = [str(warning) for warning in warnings]
    print_result(result, output, f"{path}: valid ({job.name}: {ranks_of(job)})")


def _templates_alone(folder: str, output: str) -> None:
    """Check that the templates in a folder can be read. The templates are not rendered, because rendering would need a
    job's spec."""
    from pathlib import Path

    from hyperpod_ext.errors import ConfigError
    from hyperpod_ext.jobs.own_templates import template_differences, template_problems

    if found := list(template_problems(Path(folder))):
        raise ConfigError(found)
    names = [one.name for one in template_differences(Path(folder))]
    text = f"{folder}: {count(len(names), 'template')} can be read; to also render them, name a spec and --target"
    print_result({"valid": True, "templates": names}, output, text)
