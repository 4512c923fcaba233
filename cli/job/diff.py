"""The command `hp-ext diff`."""

from __future__ import annotations

from typing import Any

import click

from ..command import TARGET, Command, output_option, spec_options, spec_path
from ..output import print_result

_DIFFERENT = 10


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext diff -f job.yaml --target hyperpod-eks
  hp-ext diff -f job.yaml --target hyperpod-eks --with rendered/job.yaml --exit-code""",
)
@spec_options
@click.option("--target", type=TARGET, default="hyperpod-eks", show_default=True, help="Target on which the job runs.")
@click.option(
    "--with", "other", type=click.Path(), metavar="FILE", help="Compare with this file instead of the running job."
)
@click.option("--exit-code", is_flag=True, help="Exit with 10 if there are differences.")
@output_option()
def command(
    spec: str | None,
    file: str | None,
    cluster: str | None,
    overrides: tuple[str, ...],
    strict: bool,
    ignored: tuple[str, ...],
    target: str,
    other: str | None,
    exit_code: bool,
    output: str,
) -> None:
    """Show the changes that a spec would make to a job on Kubernetes, field by field. Fields that the Kubernetes server
    adds are ignored."""
    from hyperpod_ext.jobs.contract.differences import differences
    from hyperpod_ext.jobs.contract.yaml_text import read_all

    from ..spec import Specs

    plan = Specs(spec_path(file, spec), cluster, overrides, strict, ignored, target).plan(target)
    if "job.yaml" not in plan.files:
        raise click.UsageError(f"`hp-ext diff` works only for jobs on Kubernetes; {target} does not run on Kubernetes.")
    (wanted,) = read_all(plan.files["job.yaml"])
    there = _file(other, wanted["kind"]) if other else _live(target, plan.job)
    for one in (wanted, there):  # do not compare the annotation that has a copy of the spec
        (one["metadata"].get("annotations") or {}).pop("hyperpod-ext/spec", None)
    found = list(differences(wanted, there))
    listed = [{"path": one.path, "there": one.there, "wanted": one.wanted} for one in found]
    print_result(listed, output, "\n".join(map(str, found)) or "no differences")
    if found and exit_code:
        raise click.exceptions.Exit(_DIFFERENT)


def _live(target: str, job: Any) -> dict[str, Any]:
    from hyperpod_ext.jobs.kubernetes import jobs
    from hyperpod_ext.jobs.kubernetes.kinds import kind_for

    return jobs.live(kind_for(target, job), job)


def _file(name: str, kind: str) -> dict[str, Any]:
    from hyperpod_ext.config.files.load import text_of
    from hyperpod_ext.errors import ConfigError, Problem
    from hyperpod_ext.jobs.kubernetes.schemas import check_yaml

    found = [one for one in check_yaml(name, text_of(name)) if one["kind"] == kind]
    if not found:
        hint = "name a manifest of this job, such as a file from `hp-ext render`"
        raise ConfigError([Problem(f"contains no {kind}", source=name, hint=hint)])
    return found[0]
