"""Flags of `run` and `submit`, and the request they make."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import click
import msgspec

from dure.cli.output import gpus
from dure.cli.refs import TierRef
from dure.cli.texts import say
from dure.client.submission import request_of
from dure.core.messages import duration
from dure.wire import JobIn


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The flags as given."""

    gpus: int
    vram: str
    tiers: tuple[str, ...]
    time: str | None
    name: str | None
    node: str | None
    env: tuple[str, ...]
    retry: int | None
    retry_on: str
    no_oom_escalate: bool
    idempotent: bool
    signal: str | None
    lab: str | None
    not_before: str | None
    label: tuple[str, ...]
    hold: bool
    workdir: str | None
    key: str | None


_OPTIONS = [
    click.option(
        "-g", "--gpus", type=click.IntRange(1, 8), default=1, help="GPUs, all in one node"
    ),
    click.option("--vram", default="0", metavar="GB", help="least GPU memory each: 24, 24GB"),
    click.option("--tier", "tiers", multiple=True, type=TierRef(), help="allowed tier; repeatable"),
    click.option("-t", "--time", metavar="TIME", help="time limit: 90m, 4h, 1h30m, 2d, 04:00:00"),
    click.option("-n", "--name", metavar="NAME", help="name (default: from the command)"),
    click.option("--node", metavar="NODE", help="only on this node"),
    click.option(
        "--env", multiple=True, metavar="K[=V]", help="environment; K alone: its value here"
    ),
    click.option("--retry", type=click.IntRange(0, 100), metavar="N", help="repeats after a loss"),
    click.option(
        "--retry-on",
        type=click.Choice(["loss", "error"]),
        default="loss",
        help="also repeat after a non-zero exit (the lab pays): error",
    ),
    click.option("--no-oom-escalate", is_flag=True, help="fail at once when GPU memory runs out"),
    click.option("--idempotent", is_flag=True, help="may run twice at the same time without harm"),
    click.option("--signal", metavar="SIG@TIME", help="signal before the time limit: USR1@5m"),
    click.option("--lab", metavar="LAB", help="lab to charge (default: yours)"),
    click.option("--not-before", metavar="WHEN", help="22:00, 2026-12-01T08:00 or +2h"),
    click.option("--label", multiple=True, metavar="K=V", help="label; repeatable"),
    click.option("--hold", is_flag=True, help="submit, but do not start until released"),
    click.option("--workdir", metavar="DIR", help="where it runs (default: here)"),
    click.option("--key", metavar="KEY", help="the same key never makes a second job"),
]


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags of a job; the command gets them as keyword arguments of `Spec`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_spec(flags: dict[str, Any]) -> Spec:
    """Cut the job's flags out of a command's keyword arguments."""
    return Spec(**{name: flags.pop(name) for name in Spec.__struct_fields__})


def build(spec: Spec, command: Sequence[str]) -> JobIn:
    """Make the request; what is wrong is a usage error."""
    try:
        return request_of(
            command,
            gpus=spec.gpus,
            min_vram=spec.vram,
            tiers=spec.tiers,
            node=spec.node,
            time=spec.time,
            name=default_name(command) if spec.name is None else spec.name,
            lab=spec.lab,
            env=dict(environment(pair) for pair in spec.env),
            retry=spec.retry,
            retry_on=spec.retry_on,
            oom_escalate=not spec.no_oom_escalate,
            idempotent=spec.idempotent,
            signal=spec.signal,
            not_before=spec.not_before,
            workdir=os.path.abspath(spec.workdir) if spec.workdir else None,  # noqa: PTH100
            labels=dict(pair(text) for text in spec.label),
            hold=spec.hold,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def environment(text: str) -> tuple[str, str]:
    """`K=V`, or `K` with the value it has here."""
    if "=" in text:
        return pair(text)
    if text not in os.environ:
        raise click.UsageError(say("env_unset", name=text))
    return text, os.environ[text]


def pair(text: str) -> tuple[str, str]:
    """`K=V` as a pair."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.UsageError(say("not_a_pair", text=text))
    return name, value


def default_name(command: Sequence[str]) -> str:
    """Name a job after its script, else its program."""
    scripts = [word for word in command[:4] if word.endswith((".py", ".sh"))]
    return os.path.basename((scripts or list(command))[0])[:200]  # noqa: PTH119


def describe(asked: JobIn, lang: str) -> str:
    """Tell a request in a few words: `2 ≥24G · 4h`."""
    parts = [gpus(asked.num_gpus, asked.min_vram_gb, asked.tiers)]
    parts += [duration(asked.time_limit_s, lang)] if asked.time_limit_s else []
    return " · ".join(parts)
