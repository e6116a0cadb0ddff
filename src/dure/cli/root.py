"""`dure`: the group, its own options, and what becomes of an error.

Commands are imported when called. `wiring` adds its own with `cli.add_lazy` (see `lazy`).
"""

from __future__ import annotations

import errno
import sys
from typing import Any

import click

from dure import __version__
from dure.cli.app import App
from dure.cli.exits import complain
from dure.cli.lazy import LazyGroup


class RootGroup(LazyGroup):
    """The top: tells errors in sentences and ends with the promised exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; click's own exceptions pass."""
        verbose = bool(ctx.params.get("verbose"))
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except OSError as error:
            if error.errno == errno.EPIPE:  # `dure jobs | head`: click's business
                raise
            code = complain(error, verbose=verbose)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the loop top of a command
            code = complain(error, verbose=verbose)
        raise click.exceptions.Exit(int(code))


@click.group(
    cls=RootGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="dure")
@click.option(
    "--url", metavar="URL", help="address of the server (else DURE_URL, else the profile)"
)
@click.option("--profile", metavar="NAME", help="saved server to use (see `dure login`)")
@click.option("-v", "--verbose", is_flag=True, help="show requests, and where an error came from")
@click.pass_context
def cli(ctx: click.Context, url: str | None, profile: str | None, verbose: bool) -> None:
    """Dure shares the GPUs of several labs: one queue, one policy, one honest account.

    \b
      dure pool                         what is free now
      dure run -g 2 -t 4h -- CMD        submit and follow
      dure queue                        the line, and why each job waits
    """  # noqa: D301 - \b is the mark of click for lines as they are
    for stream in (sys.stdout, sys.stderr):
        # A job's name must never stop a listing on a terminal that cannot show it.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    ctx.obj = App(url, profile, verbose=verbose)
    ctx.call_on_close(ctx.obj.close)


_COMMANDS = {
    "work": {"run": "submit:run", "submit": "submit:submit"},
    "look": {
        "pool": "pool:pool",
        "queue": "line:queue",
        "why": "line:why",
        "jobs": "jobs:jobs",
        "show": "jobs:show",
        "logs": "following:logs",
        "wait": "following:wait",
        "usage": "usage:usage",
        "open": "signin:open_page",
    },
    "control": {
        "cancel": "control:cancel",
        "hold": "control:hold",
        "release": "control:release",
        "retry": "control:retry",
        "rerun": "control:rerun",
        "edit": "control:edit",
    },
    "setup": {
        "login": "signin:login",
        "completion": "completion:completion",
        "api": "raw:api",
        "admin": "admin.root:admin",
    },
}
for _section, _names in _COMMANDS.items():
    for _name, _target in _names.items():
        cli.add_lazy(_name, f"dure.cli.{_target}", section=_section)
