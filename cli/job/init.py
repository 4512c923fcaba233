"""The command `hp-ext init`."""

from __future__ import annotations

import click

from ..command import TARGET, Command
from ..output import say


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext init
  hp-ext init my-job --name my-job
  hp-ext init my-job --target hyperpod-eks""",
)
@click.argument("folder", default=".", type=click.Path(file_okay=False), metavar="[DIR]")
@click.option("--name", default="tiny-gpt", show_default=True, help="Name of the job.")
@click.option(
    "--target",
    type=TARGET,
    help="Target of the job. Without a target, the spec is for local, and also injects a fault.",
)
def command(folder: str, name: str, target: str | None) -> None:
    """Write job.yaml, train.py and job.schema.json into DIR. Existing files are never overwritten."""
    import json
    from pathlib import Path

    from hyperpod_ext.config.files.document import parse
    from hyperpod_ext.config.files.load import load_text
    from hyperpod_ext.config.files.schema import json_schema
    from hyperpod_ext.config.job.job import JobConfig
    from hyperpod_ext.errors import ConflictError
    from hyperpod_ext.jobs.contract.render import render
    from hyperpod_ext.jobs.contract.targets import get_target

    if target is not None:
        get_target(target)  # `get_target` raises an error if the target is unknown
    written = name if parse(name, "--name").data == name else json.dumps(name)
    spec = render("init/job.yaml.j2", name=written, schema="job.schema.json", target=target)
    load_text(JobConfig, spec, f"--name {name}")
    files = {
        "job.yaml": spec,
        "train.py": render("init/train.py.j2"),
        "job.schema.json": json.dumps(json_schema(JobConfig), indent=2) + "\n",
    }
    at = Path(folder)
    if existing := [file for file in files if (at / file).exists()]:
        hint = "choose an empty folder, as in `hp-ext init my-job`"
        raise ConflictError(f"{at} has {', '.join(existing)} already", hint=hint)
    at.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (at / file).write_text(text)
        click.echo(at / file)
    if target in (None, "local"):
        say(f"next: hp-ext create-job -f {at / 'job.yaml'} --target local --wait")
    else:
        say(f"next: edit the lines marked CHANGE, then hp-ext create-job -f {at / 'job.yaml'} --target {target}")
