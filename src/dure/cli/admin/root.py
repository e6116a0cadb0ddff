"""The group `dure admin` and its subgroups."""

from __future__ import annotations

import click

from dure.cli.lazy import LazyGroup

_VERBS = {
    "tier": ("ls", "set", "rm"),
    "node": ("ls", "drain", "resume"),
    "lab": ("ls", "set"),
    "user": ("ls", "set"),
    "token": ("ls", "new", "rm"),
    "maintenance": ("status", "start", "end"),
    "forecast": ("score",),
}


@click.group(cls=LazyGroup)
def admin() -> None:
    """Change tiers, nodes, labs, users, tokens and the maintenance phase."""


def group_of(noun: str, doc: str) -> LazyGroup:
    """Make the group of one noun; its verbs are functions `VERB_` of `admin.NOUN`."""
    from dure.cli.texts import COMMANDS  # noqa: PLC0415

    group = LazyGroup(noun, help=doc)
    for verb in _VERBS[noun]:
        summary = COMMANDS[f"{noun}_{verb}"]
        group.add_lazy(verb, f"dure.cli.admin.{noun}:{verb}_", summary, section="other")
    return group


tier = group_of("tier", "GPU models: memory, charge rate, order, GPUs per job.")
node = group_of("node", "Machines: take out of service, put back.")
lab = group_of("lab", "Labs: weight and limits.")
user = group_of("user", "People: lab, role, limits.")
token = group_of("token", "API tokens.")
maintenance = group_of("maintenance", "Hold the queue for a maintenance.")
forecast = group_of("forecast", "How well expected starts came true.")
for _noun in _VERBS:
    admin.add_lazy(_noun, f"dure.cli.admin.root:{_noun}", section="other")
