"""A real server that gives every person a Unix user of their own."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dure.client import ApiError
from dure.wire import UserIn
from tests.e2e.site import Site, until
from tests.jail.rigs import IS_ROOT, need_root

FIRST = 64_300


@pytest.fixture
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="dure-site-", dir="/var/tmp") as folder:
        made = Site(Path(folder))
        text = made.config.read_text()
        made.config.write_text(text.replace("[policy]", f"[policy]\nfirst_unix_uid = {FIRST}"))
        made.start()
        yield made
        made.close()


def test_everybody_is_given_a_unix_user_and_keeps_it(site):
    site.member("kim", "BCG")
    site.member("lee", "KDG")
    admin = site.admin()
    assert [admin.user(n).unix_uid for n in ("admin", "kim", "lee")] == [
        FIRST,
        FIRST + 1,
        FIRST + 2,
    ]
    admin.put_user("kim", UserIn(lab="KDG"))
    assert admin.user("kim").unix_uid == FIRST + 1
    admin.put_user("kim", UserIn(lab="KDG", unix_uid=70_000))
    assert admin.user("kim").unix_uid == 70_000
    with pytest.raises(ApiError) as refusal:
        admin.put_user("lee", UserIn(lab="KDG", unix_uid=70_000))
    assert (refusal.value.status, refusal.value.code) == (409, "IN_USE")


def test_jobs_run_as_their_user_and_see_nothing_of_each_other(site):
    if not IS_ROOT:
        need_root()
    kim, lee = site.member("kim", "BCG"), site.member("lee", "KDG")
    one = kim.submit(["bash", "-c", "id -u; echo secret > r; touch ready; sleep 60"], workdir="")
    until(lambda: b"6430" in kim.read_log(one.id).data, "kim's job runs")
    out = Path(kim.job_out(one.id).output_dir)
    until((out / "ready").exists, "ready")
    assert out.stat().st_uid == FIRST + 1
    two = lee.submit(["bash", "-c", f"id -u; cat {out}/r; ls /proc | grep -c '^[0-9]'"], workdir="")
    two.wait(timeout="15s")
    words = lee.read_log(two.id).data.decode()
    assert words.startswith(f"{FIRST + 2}\n")
    assert "secret" not in words.replace("/r:", "")
    assert int(words.split()[-1]) <= 6
    one.cancel()
    until(lambda: kim.attempts(one.id)[0].freed_ms, "freed")
    attempt = kim.attempts(one.id)[0]
    assert attempt.term_ms
    assert site.audit().returncode == 0


def test_a_workdir_that_may_not_be_seen_is_refused_with_a_sentence(site):
    kim = site.member("kim", "BCG")
    with pytest.raises(ApiError) as refused:
        kim.submit(["true"], workdir="/etc")
    assert refused.value.code == "INVALID_REQUEST"
    assert "may not be shown to this job" in str(refused.value.problem)
    assert kim.jobs() == []


def test_memory_of_a_job_is_judged_by_what_was_recorded(site):
    kim = site.member("kim", "BCG")
    code = "raise MemoryError('9 GiB')"
    job = kim.submit([sys.executable, "-c", code], oom_escalate=False, workdir="")
    until(lambda: kim.job_out(job.id).state.value == "FAILED", "failed")
    # On a declared slot the limit of memory is the card's.
    assert kim.attempts(job.id)[0].outcome == "gpu_oom"
