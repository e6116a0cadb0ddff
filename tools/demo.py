"""`make demo`: two labs, real training jobs, one queue, one account; ends by itself.

Starts the embedded server (SQLite, this machine), submits through the REST API what two
labs would submit, shows the line with its reasons while it moves, then results, waits and
charges, and proves the account. Nothing is staged: the job that runs out of memory really
does, under the limit that its slot declares.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from dure.client import Client, Job
from dure.core.model import TERMINAL
from dure.wire import JobOut, LabIn, TokenIn, UserIn

sys.path.insert(0, str(Path(__file__).parent))
import up

STATE = up.ROOT / "var" / "demo"
LANG = os.environ.get("DURE_LANG") or (
    "ko" if os.environ.get("LANG", "").startswith("ko") else "en"
)
TIMEOUT_S = 240.0


def tell(english: str, korean: str) -> None:
    """One sentence in the reader's language."""
    print(korean if LANG == "ko" else english, flush=True)


class Lab:
    """A lab with one user, signed in."""

    def __init__(self, admin: Client, name: str, used_tflop_s: float) -> None:
        self.name = name
        admin.put_lab(name, LabIn(opening_tflop_s=used_tflop_s))
        user = f"{name.lower()}-kim"
        admin.put_user(user, UserIn(lab=name))
        token = admin.new_token(TokenIn(user=user, label="demo"))
        self.client = Client(url=admin.url, token=token.secret, language=LANG)

    def submit(
        self, name: str, script: str, *args: str, gpus: int = 1, tiers: Sequence[str] = ()
    ) -> Job:
        """Submit one of the shipped training programs."""
        command = [sys.executable, str(up.ROOT / "examples" / script), *args]
        return self.client.submit(command, name=name, gpus=gpus, tiers=tiers)


def show_queue(client: Client, seen: set[str]) -> None:
    """Print each row of the line whose words have changed."""
    for row in client.queue().items:
        rank = row.rank or "–"
        words = f"{rank:>4}  {row.name:<11} {row.lab}  {row.num_gpus} GPU  {row.reason.text}"
        if words not in seen:
            seen.add(words)
            print(f"  {words}", flush=True)


def show_changes(jobs: dict[str, JobOut], states: dict[str, str]) -> None:
    """Print each job whose state has changed."""
    for name, job in jobs.items():
        place = job.placement if job.state == "RUNNING" else None
        words = job.state_text + (f"  {place.tier} {place.gpus}" if place else "")
        if states.get(name) != words:
            states[name] = words
            print(f"  {name:<11} → {words}", flush=True)


def watch(client: Client, jobs: dict[str, Job], cancel: str) -> dict[str, JobOut]:
    """Watch until all jobs have ended; cancel one of them once it has trained a little."""
    seen: set[str] = set()
    states: dict[str, str] = {}
    asked = False
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        found = {name: client.job_out(job.id) for name, job in jobs.items()}
        show_changes(found, states)
        show_queue(client, seen)
        if not asked and b"epoch 3" in client.read_log(jobs[cancel].id).data:
            tell(f"  … cancelling {cancel}", f"  … {cancel} 취소")
            jobs[cancel].cancel()
            asked = True
        if all(job.state in TERMINAL for job in found.values()) and all_freed(client, jobs):
            return {name: client.job_out(job.id) for name, job in jobs.items()}
        time.sleep(0.3)
    sys.exit(f"demo: the jobs did not end in time; see {STATE / 'server.log'}")


def all_freed(client: Client, jobs: dict[str, Job]) -> bool:
    """Whether every GPU was seen free, so that everything is charged."""
    return all(a.freed_ms for job in jobs.values() for a in client.attempts(job.id))


def show_results(client: Client, jobs: dict[str, JobOut]) -> None:
    """A table: state, where, how long it waited and ran, and what was charged."""
    english = ("JOB", "LAB", "STATE", "WHERE", "TRY", "WAIT", "RUN", "TFLOP-s")
    korean = ("작업", "연구실", "상태", "위치", "시도", "대기", "실행", "TFLOP-s")
    print("\n  " + row(korean if LANG == "ko" else english))
    for name, job in jobs.items():
        tries = [a for a in client.attempts(job.id) if a.started_ms]
        wait_s = (tries[0].started_ms - job.submitted_ms) / 1000
        run_s = sum(a.ended_ms - a.started_ms for a in tries) / 1000
        reserved = float(job.charge.reserved_tflop_s)
        note = f"  ({reserved:.2f} {'선점' if LANG == 'ko' else 'reserved'})" if reserved else ""
        total = f"{float(job.charge.total_tflop_s):.2f}"
        where = tries[-1].placement.tier
        cells = (name, job.lab, job.state_text, where, str(job.starts))
        print("  " + row((*cells, f"{wait_s:.1f}s", f"{run_s:.1f}s", total)) + note)


def row(cells: Sequence[str]) -> str:
    """Cells in columns; a Hangul letter is two columns wide."""
    widths = (-11, -6, -12, -8, 4, 7, 7, 9)
    parts = []
    for cell, width in zip(cells, widths, strict=True):
        wide = sum(unicodedata.east_asian_width(c) in "WF" for c in cell)
        space = " " * max(0, abs(width) - len(cell) - wide)
        parts.append(cell + space if width < 0 else space + cell)
    return " ".join(parts)


def check(condition: bool, sentence: str) -> None:
    """The demo is a test too: what it shows must have happened."""
    if not condition:
        sys.exit(f"demo: {sentence}")


def run(url: str) -> None:
    """The whole story, against a server that has just started."""
    admin = Client(url=url, token=(STATE / "admin-token").read_text().strip(), language=LANG)
    tell("\nTwo labs with different past use:", "\n과거 사용량이 다른 두 연구실:")
    bcg, kdg = Lab(admin, "BCG", 24_000), Lab(admin, "KDG", 60_000)
    for lab in (bcg, kdg):
        print(f"  {lab.name:<6} {float(admin.lab(lab.name).usage_tflop_s):>10,.0f} TFLOP-s")
    tiers = [t.name for t in admin.tiers()]
    best = tiers[:1]
    tell("\nThey submit; the queue moves:", "\n작업을 제출합니다. 대기열이 움직입니다:")
    jobs = {
        "digits-bcg": bcg.submit(
            "digits-bcg", "digits.py", "--epochs=30", "--pause-s=0.1", tiers=best
        ),
        "digits-kdg": kdg.submit(
            "digits-kdg", "digits.py", "--epochs=60", "--pause-s=0.1", tiers=best
        ),
        "long": kdg.submit("long", "digits.py", "--epochs=5000", "--pause-s=0.2"),
    }
    if len(tiers) > 1:
        jobs["pair"] = bcg.submit(
            "pair", "digits.py", "--epochs=30", "--workers=2", gpus=2, tiers=best
        )
        jobs["kernel"] = kdg.submit("kernel", "kernel_ridge.py", "--shifts=4")
    else:
        tell(
            "  (one tier of real GPUs: reservation and out-of-memory are left out)",
            "  (실제 GPU 등급이 하나라 선점과 메모리 부족 부분은 생략합니다)",
        )
    ended = watch(admin, jobs, cancel="long")
    show_results(admin, ended)
    check(ended["long"].state == "CANCELLED", "the cancelled job is not CANCELLED")
    others = [j.state for n, j in ended.items() if n != "long"]
    check(all(s == "COMPLETED" for s in others), f"a job failed: {others}")
    if "pair" in ended:
        check(float(ended["pair"].charge.reserved_tflop_s) > 0, "the pair never reserved")
        check(ended["kernel"].starts == 2, "the kernel job did not escalate")
        tell(
            "\n  kernel ran out of memory on the small slot and moved to a larger one by itself.",
            "\n  kernel은 작은 슬롯에서 메모리가 부족해 더 큰 슬롯으로 스스로 옮겼습니다.",
        )
    tell("\nThe account, recomputed from the attempts:", "\n시도 기록에서 다시 계산한 장부:")


def main() -> int:
    """Set up, run, prove, clean up."""
    if up.running(STATE) is not None:
        up.stop(STATE)
    shutil.rmtree(STATE, ignore_errors=True)
    server = up.spawn(STATE, "--port", "0")
    try:
        url = up.wait_url(STATE, server)
        tell(
            f"Dure runs embedded at {url} (SQLite, this machine).",
            f"Dure가 {url} 에서 실행 중입니다(SQLite, 이 컴퓨터).",
        )
        if not up.has_gpus():
            tell(
                "No NVIDIA GPU here: four SIMULATED slots stand in; their memory limit is real.",
                "NVIDIA GPU가 없어 모의 슬롯 4개를 씁니다. 메모리 한도는 실제입니다.",
            )
        run(url)
        config = str(STATE / "dure.toml")
        audited = subprocess.run([up.DURE, "audit", "--config", config], check=False)
        check(audited.returncode == 0, "the account does not close")
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    check(server.returncode == 0, f"the server ended with {server.returncode}")
    check(not leftovers(), f"processes were left behind: {leftovers()}")
    tell(
        "\nDone; no process is left. `make up` starts a server that stays.",
        "\n끝났습니다. 남은 프로세스가 없습니다. `make up`은 계속 도는 서버를 시작합니다.",
    )
    return 0


def leftovers() -> list[int]:
    """Processes that still work in the demo's folder."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            words = (proc / "cmdline").read_bytes() + b"\0" + (proc / "environ").read_bytes()
        except OSError:
            continue
        if str(STATE).encode() in words and int(proc.name) != os.getpid():
            found.append(int(proc.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
