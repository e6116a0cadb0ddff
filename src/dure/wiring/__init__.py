"""The only place that names concrete classes: builds a server, adds the local commands."""

from __future__ import annotations

_LOCAL = {
    "server": ("Run the server of this installation", "이 설치의 서버를 실행합니다"),
    "audit": ("Prove that the account closes", "장부가 맞아떨어지는지 증명합니다"),
    "doctor": (
        "Check this machine, the settings and the server",
        "이 컴퓨터와 설정과 서버를 점검합니다",
    ),
}
_SLURM = (
    "Check a Slurm cluster, print what it lacks",
    "Slurm 클러스터를 점검하고 설정을 제안합니다",
)
_SIMULATE = ("Compare policies on a recorded load", "기록된 부하에서 정책을 비교합니다")


def main() -> None:
    """Run the command line; what does not talk HTTP is imported only when it is called."""
    from dure.cli import cli  # noqa: PLC0415 - importing `dure.wiring` alone must stay free

    for name, summary in _LOCAL.items():
        cli.add_lazy(name, f"dure.wiring.local_commands:{name}", summary, section="server")
    cli.add_lazy("slurm", "dure.wiring.slurm_commands:slurm", _SLURM, section="server")
    cli.add_lazy("simulate", "dure.sim.command:simulate", _SIMULATE, section="server")
    cli()
