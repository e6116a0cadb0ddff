"""Helpers for training programs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dure_sdk import job


def test_outside_of_dure(monkeypatch, tmp_path):
    monkeypatch.delenv("JOB_ATTEMPT", raising=False)
    monkeypatch.delenv("JOB_OUTPUT_DIR", raising=False)
    assert job.attempt() == 1
    assert job.output_dir() == Path()
    job.progress(1, 2)  # goes nowhere
    assert not job.stopping()


def test_inside(monkeypatch, tmp_path):
    monkeypatch.setenv("JOB_ATTEMPT", "3")
    monkeypatch.setenv("JOB_OUTPUT_DIR", str(tmp_path / "out"))
    assert job.attempt() == 3
    assert job.output_dir() == tmp_path / "out"
    assert job.output_dir().is_dir()


def test_progress_is_whole_and_rare(monkeypatch, tmp_path):
    monkeypatch.setenv("JOB_OUTPUT_DIR", str(tmp_path))
    monkeypatch.setattr(job, "_told_s", float("-inf"))
    path = tmp_path / ".dure" / "progress.json"
    job.progress(1, 10, loss=0.5)
    job.progress(2, 10)  # within the same second
    assert json.loads(path.read_text())["done"] == 1
    assert json.loads(path.read_text())["facts"] == {"loss": 0.5}
    job.progress(10, 10)  # the end is always told
    assert json.loads(path.read_text())["done"] == 10


SAVES = """
import sys, time
from dure_sdk import job
job.on_stop(lambda: (print("saved", flush=True), time.sleep(0.3)))
print("ready", flush=True)
time.sleep(20)
"""
POLLS = """
import time
from dure_sdk import job
job.on_stop()
print("ready", flush=True)
while not job.stopping(): time.sleep(0.05)
print("saved", flush=True)
"""


@pytest.mark.parametrize(("text", "code"), [(SAVES, 143), (POLLS, 0)])
def test_stop(text, code):
    child = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    child.send_signal(signal.SIGTERM)  # impatience does not cut the checkpoint short
    out, _ = child.communicate(timeout=10)
    assert out == "saved\n"
    assert child.returncode == code


def test_handler_that_was_there_is_called_too():
    text = "import signal\nsignal.signal(15, lambda *a: print('theirs', flush=True))\n" + POLLS
    child = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=10)[0] == "theirs\nsaved\n"
