"""The command `hp-ext completion`."""

from __future__ import annotations

import click

from ..command import Command


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext completion bash > ~/.local/share/bash-completion/completions/hp-ext
  hp-ext completion zsh > ~/.zfunc/_hp-ext
  hp-ext completion fish > ~/.config/fish/completions/hp-ext.fish""",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print a shell's completion script for commands and options."""
    from click.shell_completion import get_completion_class

    completion = get_completion_class(shell)
    assert completion is not None, "click supports all three shells"
    click.echo(completion(ctx.find_root().command, {}, "hp-ext", "_HP_EXT_COMPLETE").source())
