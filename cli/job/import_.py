"""hp-ext import"""

from __future__ import annotations

import click

from ..command import Command, output_option
from ..output import print_result, say


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext import hyperpod-job.yaml > job.yaml
  hp-ext import config.yaml > job.yaml        # of hyp init hyp-pytorch-job
  kubectl get hyperpodpytorchjob NAME -o yaml | hp-ext import -""",
)
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True), metavar="FILE")
@output_option()
def command(file: str, output: str) -> None:
    """Turn somebody else's job into a spec, and tell what is lost: a job for Kubernetes, a config.yaml of AWS's hyp, an
    sbatch file or a CreateTrainingJob request."""
    import sys
    from pathlib import Path

    from hyperpod_ext.errors import NotFoundError
    from hyperpod_ext.submit.contract.spec_annotation import without_defaults
    from hyperpod_ext.submit.import_any import import_file

    if file != "-" and not Path(file).is_file():
        raise NotFoundError(f"there is no file {file}")
    text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    found = import_file(text, file)
    for part in found.left_out:
        say(f"not carried over: {part}")
    result = {"target": found.target, "job": without_defaults(found.job), "left_out": found.left_out}
    print_result(result, "table" if output == "table" else output, found.to_yaml().rstrip("\n"))
