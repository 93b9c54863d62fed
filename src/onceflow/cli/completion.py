"""``onceflow completion``: the script with which a shell completes commands and options, made by click."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from onceflow.cli.examples import examples

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_ONCEFLOW_COMPLETE"  # click's own name for a program called onceflow


@examples(
    "onceflow completion bash >> ~/.bashrc",
    "onceflow completion fish > ~/.config/fish/completions/onceflow.fish",
)
@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script with which SHELL completes commands and options."""
    made = get_completion_class(shell)
    if made is None:  # click knows all three
        raise click.UsageError(f"this version of click cannot complete in {shell}")
    click.echo(made(click.get_current_context().find_root().command, {}, "onceflow", VARIABLE).source())
