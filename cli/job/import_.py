"""The command `hp-ext import`."""

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
  hp-ext import job.yaml-template --set NUM_NODES=4 --env-file values.env > job.yaml
  hp-ext import train.sbatch --set PWD=/fsx/job --set 1=7b > job.yaml    # folder and argument of sbatch
  helm template NAME CHART | hp-ext import - > job.yaml
  hp-ext import jobs/ -o json                 # all files of a folder
  kubectl get hyperpodpytorchjob NAME -o yaml | hp-ext import -""",
)
@click.argument("file", type=click.Path(allow_dash=True), metavar="FILE|DIR")
@click.option(
    "--set", "sets", multiple=True, metavar="NAME=VALUE", help="Value of a placeholder in the file. Repeatable."
)
@click.option("--values", type=click.Path(), metavar="FILE", help="YAML file with values of placeholders.")
@click.option(
    "--env-file", type=click.Path(), metavar="FILE", help="File with values of placeholders, one NAME=VALUE per line."
)
@output_option()
def command(file: str, sets: tuple[str, ...], values: str | None, env_file: str | None, output: str) -> None:
    """Convert a Kubernetes job, a config.yaml of AWS's `hyp`, an sbatch file or a CreateTrainingJob request to a spec.
    Parts of the file that a spec cannot express are listed on stderr. If the argument is a folder, the command
    converts nothing, and shows for each job file in the folder whether the file can be imported."""
    from pathlib import Path

    from hyperpod_ext.config.files.load import text_of
    from hyperpod_ext.jobs.import_any import import_file
    from hyperpod_ext.jobs.import_folder import LARGEST_BYTES, import_folder
    from hyperpod_ext.jobs.imports.placeholders import read_values

    given = read_values(sets, values, env_file)
    if file != "-" and Path(file).is_dir():
        report = import_folder(Path(file), given)
        print_result(report.to_json(), output, report.to_text())
        return
    found = import_file(text_of(file, LARGEST_BYTES), file, given)
    for part in found.left_out:
        say(f"not carried over: {part}")
    for part in found.notes:
        say(f"note: {part}")
    result = {"target": found.target, "job": found.written(), "left_out": found.left_out}
    result["notes"] = found.notes
    print_result(result, "table" if output == "table" else output, found.to_yaml().rstrip("\n"))
