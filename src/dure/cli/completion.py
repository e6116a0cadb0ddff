"""`dure completion`: click's own, with ids and tiers asked of the server."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    r"""Print the completion script of SHELL.

    \b
      bash: dure completion bash > ~/.local/share/bash-completion/completions/dure
      zsh:  eval "$(dure completion zsh)"      in ~/.zshrc
      fish: dure completion fish > ~/.config/fish/completions/dure.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"click does not know {shell}")
    click.echo(kind(ctx.find_root().command, {}, "dure", "_DURE_COMPLETE").source())
