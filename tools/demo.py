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
from pathlib import Path

from dure.client import Client
from dure.core.messages import duration

sys.path.insert(0, str(Path(__file__).parent))
import up

STATE = up.ROOT / "var" / "demo"
LANG = os.environ.get("DURE_LANG") or (
    "ko" if os.environ.get("LANG", "").startswith("ko") else "en"
)
ENDED = {"COMPLETED", "FAILED", "TIMED_OUT", "CANCELLED", "DEAD"}
TIMEOUT_S = 240.0


def tell(english: str, korean: str) -> None:
    """One sentence in the reader's language."""
    print(korean if LANG == "ko" else english, flush=True)


class Lab:
    """A lab with one user, signed in."""

    def __init__(self, admin: Client, url: str, name: str, used_tflop_s: float) -> None:
        self.name = name
        admin.request("PUT", f"/v1/labs/{name}", {"opening_tflop_s": used_tflop_s})
        user = f"{name.lower()}-kim"
        admin.request("PUT", f"/v1/users/{user}", {"lab": name})
        token = admin.request("POST", "/v1/tokens", {"user": user, "label": "demo"})
        self.client = Client(url=url, token=token["secret"], language=LANG)

    def submit(self, name: str, script: str, *args: str, **request: object) -> int:
        """Submit one of the shipped training programs."""
        command = [sys.executable, str(up.ROOT / "examples" / script), *args]
        body = {"name": name, "command": command, **request}
        job = self.client.request("POST", "/v1/jobs", body)
        return int(job["id"])


def show_queue(client: Client, seen: set[str]) -> None:
    """Print each row of the line whose words have changed."""
    for row in client.request("GET", "/v1/queue")["items"]:
        words = f"{row['rank'] or '–':>4}  {row['name']:<11} {row['lab']}  {row['num_gpus']} GPU  "
        words += row["reason"]["text"]
        if words not in seen:
            seen.add(words)
            print(f"  {words}", flush=True)


def wait(client: Client, jobs: dict[str, int], cancel: str) -> dict[str, dict[str, object]]:
    """Watch until all jobs have ended; cancel one of them once it has trained a little."""
    seen: set[str] = set()
    states: dict[str, str] = {}
    asked = False
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        found = {n: client.request("GET", f"/v1/jobs/{i}") for n, i in jobs.items()}
        for name, job in found.items():
            place = job["placement"]
            where = (
                f" {place['tier']} {place['gpus']}" if place and job["state"] == "RUNNING" else ""
            )
            if states.get(name) != job["state_text"] + where:
                states[name] = job["state_text"] + where
                print(f"  {name:<11} → {states[name]}", flush=True)
        show_queue(client, seen)
        if not asked and found[cancel]["state"] == "RUNNING" and trained(client, jobs[cancel]):
            tell(f"  … cancelling {cancel}", f"  … {cancel} 취소")
            client.request("POST", f"/v1/jobs/{jobs[cancel]}/cancel")
            asked = True
        if all(job["state"] in ENDED for job in found.values()):
            return found
        time.sleep(0.2)
    sys.exit("demo: the jobs did not end in time; see " + str(STATE / "server.log"))


def trained(client: Client, job: int) -> bool:
    """Whether the job's log shows some epochs, so that a checkpoint is worth something."""
    return "epoch 3" in client.text(f"/v1/jobs/{job}/logs")


def show_results(jobs: dict[str, dict[str, object]]) -> None:
    """A table: state, where, how long it waited and ran, and what was charged."""
    print(
        f"\n  {'JOB':<11} {'LAB':<4} {'STATE':<12} {'WHERE':<10} {'TRY':>3} {'WAIT':>6} {'RUN':>6} {'TFLOP-s':>10}"
    )
    for name, job in jobs.items():
        place = job["placement"] or {"tier": "–"}
        started, ended = job["started_ms"], job["ended_ms"]
        wait_s = ((started or ended) - job["submitted_ms"]) / 1000
        run_s = (ended - started) / 1000 if started else 0
        charge = job["charge"]
        reserved = float(charge["reserved_tflop_s"])
        note = f"  ({reserved:.2f} reserved)" if reserved else ""
        print(
            f"  {name:<11} {job['lab']:<4} {job['state_text']:<12} {place['tier']:<10} "
            f"{job['starts']:>3} {duration(wait_s, LANG):>6} {duration(run_s, LANG):>6} "
            f"{float(charge['total_tflop_s']):>10.2f}{note}"
        )


def check(condition: bool, sentence: str) -> None:
    """The demo is a test too: what it shows must have happened."""
    if not condition:
        sys.exit(f"demo: {sentence}")


def run(url: str) -> None:
    """The whole story, against a server that has just started."""
    admin = Client(url=url, token=(STATE / "admin-token").read_text().strip(), language=LANG)
    tell("\nTwo labs with different past use:", "\n과거 사용량이 다른 두 연구실:")
    bcg, kdg = Lab(admin, url, "BCG", 24_000), Lab(admin, url, "KDG", 60_000)
    for lab in admin.request("GET", "/v1/labs")["items"]:
        print(f"  {lab['name']:<6} {float(lab['usage_tflop_s']):>10,.0f} TFLOP-s")
    tiers = [t["name"] for t in admin.request("GET", "/v1/tiers")["items"]]
    best = {"tiers": [tiers[0]]}
    tell("\nThey submit; the queue moves:", "\n작업을 제출합니다. 대기열이 움직입니다:")
    jobs = {
        "digits-bcg": bcg.submit(
            "digits-bcg", "digits.py", "--epochs", "30", "--pause-s", "0.1", **best
        ),
        "digits-kdg": kdg.submit(
            "digits-kdg", "digits.py", "--epochs", "60", "--pause-s", "0.1", **best
        ),
        "long": kdg.submit("long", "digits.py", "--epochs", "5000", "--pause-s", "0.2"),
    }
    if len(tiers) > 1:
        jobs["pair"] = bcg.submit(
            "pair", "digits.py", "--epochs", "30", "--workers", "2", num_gpus=2, **best
        )
        jobs["kernel"] = kdg.submit("kernel", "kernel_ridge.py", "--shifts", "4")
    else:
        tell(
            "  (one tier of real GPUs: the reservation and out-of-memory parts are left out)",
            "  (실제 GPU 등급이 하나라 선점과 메모리 부족 부분은 생략합니다)",
        )
    ended = wait(admin, jobs, cancel="long")
    show_results(ended)
    check(ended["long"]["state"] == "CANCELLED", "the cancelled job is not CANCELLED")
    check(all(j["state"] == "COMPLETED" for n, j in ended.items() if n != "long"), "a job failed")
    if "pair" in ended:
        check(float(ended["pair"]["charge"]["reserved_tflop_s"]) > 0, "the pair never reserved")
        check(ended["kernel"]["starts"] == 2, "the kernel job did not escalate")
        tell(
            "\n  kernel ran out of memory on the small slot and was moved to a larger one by itself.",
            "\n  kernel은 작은 슬롯에서 메모리가 부족해 더 큰 슬롯으로 자동 이동했습니다.",
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
