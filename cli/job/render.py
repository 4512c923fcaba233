"""The command `hp-ext render`."""

from __future__ import annotations

import click

from ..command import TARGET, Command, output_option, spec_options, spec_path
from ..output import count, print_result, say


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext render -f job.yaml --target local
  hp-ext render -f job.yaml --target local --out rendered
  hp-ext render -f job.yaml --target hyperpod-eks --templates my-templates""",
)
@spec_options
@click.option(
    "--target", type=TARGET, default="local", show_default=True, help="Target for which the files are rendered."
)
@click.option(
    "--templates", type=click.Path(), metavar="DIR", help="Folder whose templates replace the shipped templates."
)
@click.option("--out", type=click.Path(file_okay=False), metavar="DIR", help="Write the files into this folder.")
@output_option()
def command(
    spec: str | None,
    file: str | None,
    cluster: str | None,
    overrides: tuple[str, ...],
    strict: bool,
    ignored: tuple[str, ...],
    target: str,
    templates: str | None,
    out: str | None,
    output: str,
) -> None:
    """Show exactly the files that `hp-ext create-job` would submit."""
    from pathlib import Path

    from ..spec import Specs

    plan = Specs(spec_path(file, spec), cluster, overrides, strict, ignored, target).plan(target, templates)
    if out is None:
        print_result(plan.to_json(), output, "".join(plan.files.values()).rstrip("\n"))
        return
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in plan.files.items():
        (folder / name).write_text(text)
    written = [str(folder / name) for name in plan.files]
    print_result({"written": written}, output, "\n".join(written))
    say(f"{count(len(written), 'file')} for target {target}")
