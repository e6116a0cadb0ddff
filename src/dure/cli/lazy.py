"""Groups whose commands are imported only when they are called.

`wiring` adds the commands that do not talk HTTP to the same group:

    from dure.cli import cli
    cli.add_lazy("server", "dure.wiring.local_commands:server",
                 ("Run the server", "서버 실행"), section="server")

Help needs no import: the summary is given beside the target.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

import click

from dure.cli.texts import COMMANDS, SECTIONS, Text, lang, pick, say


class Lazy(NamedTuple):
    """A command that is not imported yet: `module:attribute`, its summary, its section."""

    target: str
    summary: Text
    section: str


class LazyGroup(click.Group):
    """A click group that knows its commands by target and summary."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.lazy: dict[str, Lazy] = {}

    def add_lazy(
        self, name: str, target: str, summary: Text | None = None, *, section: str = "other"
    ) -> None:
        """Add `target` (`package.module:attribute`, a click command) under `name`.

        `summary` is (English, Korean); without it, `texts.COMMANDS[name]`. `section` is a
        key of `texts.SECTIONS`. A later call with the same name replaces the earlier one.
        """
        self.lazy[name] = Lazy(target, summary or COMMANDS[name], section)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return names in the order in which they were added."""
        return [*self.lazy, *(n for n in super().list_commands(ctx) if n not in self.lazy)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command now, unless it is an ordinary one."""
        known = self.lazy.get(cmd_name)
        if known is None:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = known.target.partition(":")
        command = getattr(import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{known.target} is no click command")
        command.short_help = pick(known.summary)
        if lang() == "ko" and command.help and not command.help.startswith(known.summary[1]):
            command.help = f"{known.summary[1]}\n\n{command.help}"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; of a misspelt one, name the nearest."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches  # noqa: PLC0415 - only for a mistake

            near = get_close_matches(str(args[0]), self.list_commands(ctx), n=1)
            hint = f" {say('did_you_mean', name=near[0])}" if near else ""
            message = f"No such command {args[0]!r}.{hint}" if hint else error.message
            raise click.UsageError(message, ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section, from the summaries alone."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            known = self.lazy.get(name)
            if known is not None:
                row, section = (name, pick(known.summary)), known.section
            else:
                command = super().get_command(ctx, name)
                if command is None or command.hidden:
                    continue
                row, section = (name, command.get_short_help_str()), "other"
            sections.setdefault(section, []).append(row)
        for section, rows in sections.items():
            with formatter.section(pick(SECTIONS[section])):
                formatter.write_dl(rows)
