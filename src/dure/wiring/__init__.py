"""The only place that names concrete classes: builds a server, adds the local commands."""

from __future__ import annotations

_LOCAL = {
    "server": (
        "local_commands",
        "Run the server of this installation",
        "이 설치의 서버를 실행합니다",
    ),
    "audit": (
        "local_commands",
        "Prove that the account closes",
        "장부가 맞아떨어지는지 증명합니다",
    ),
    "doctor": (
        "local_commands",
        "Check this machine, the settings and the server",
        "이 컴퓨터와 설정과 서버를 점검합니다",
    ),
    "agent": (
        "agent_commands",
        "Run this machine as an edge node of a server",
        "이 컴퓨터를 서버의 엣지 노드로 실행합니다",
    ),
    "slurm": (
        "slurm_commands",
        "Check a Slurm cluster, print what it lacks",
        "Slurm 클러스터를 점검하고 설정을 제안합니다",
    ),
    "simulate": (
        "simulate",
        "Compare policies on a recorded load",
        "기록된 부하에서 정책을 비교합니다",
    ),
    "sdk": (
        "sdk_commands",
        "What goes into training images: `dure sdk bundle`",
        "학습 이미지에 넣는 것: `dure sdk bundle`",
    ),
}
"""Command -> its module here, and what it does in English and Korean."""


def main() -> None:
    """Run the command line; what does not talk HTTP is imported only when it is called."""
    from dure.cli import cli  # noqa: PLC0415 - importing `dure.wiring` alone must stay free

    for name, (module, *summary) in _LOCAL.items():
        target = f"dure.wiring.{module}:{name}"
        cli.add_lazy(name, target, (summary[0], summary[1]), section="server")
    cli()
