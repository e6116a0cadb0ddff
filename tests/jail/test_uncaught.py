"""The hook that writes down what ended a Python process, in a jail and without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dure
from dure.adapters.runtime.environment import BOOT
from dure.adapters.runtime.inside.uncaught import collect
from dure.core.model import Evidence, OomKind
from dure.core.oom import oom_kind

PATH = str(Path(dure.__file__).parent / BOOT)
TORCH = """
import sys, types
torch = types.ModuleType("torch")
class OutOfMemoryError(RuntimeError): pass
OutOfMemoryError.__module__ = "torch"
torch.OutOfMemoryError = OutOfMemoryError
"""
CASES = {
    "uncaught": ("raise torch.OutOfMemoryError('CUDA out of memory. Tried')", OomKind.GPU),
    "from": (
        "try: raise torch.OutOfMemoryError('x')\nexcept Exception as e: raise RuntimeError('w') from e",
        OomKind.GPU,
    ),
    "while handling": (
        "try: raise torch.OutOfMemoryError('x')\nexcept Exception: open('/no/such/file')",
        OomKind.GPU,
    ),
    "from None": (
        "try: raise torch.OutOfMemoryError('x')\nexcept Exception: raise KeyError(1) from None",
        None,
    ),
    "caught": (
        "try: raise torch.OutOfMemoryError('x')\nexcept Exception: pass\nraise KeyError(1)",
        None,
    ),
    "python": ("raise MemoryError", OomKind.HOST),
    "a kind of it": ("class Array(MemoryError): pass\nraise Array('9 GiB')", OomKind.HOST),
    "strange": (
        "class S(Exception):\n  def __str__(self): raise ValueError\nraise S",
        None,
    ),
    "exit": ("sys.exit(3)", None),
}


def run(folder: Path, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", TORCH + code],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": PATH, "DURE_UNCAUGHT": str(folder), **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", CASES)
def test_record_of_what_ended_it(tmp_path, name):
    code, kind = CASES[name]
    done = run(tmp_path, code)
    assert done.returncode
    text = collect(str(tmp_path), 0)
    assert (text == "") is (name in ("exit", "strange"))
    assert oom_kind(Evidence(exit_code=1, exception=text)) is kind
    # What is printed is what Python alone would print.
    bare = subprocess.run(
        [sys.executable, "-c", TORCH + code], capture_output=True, text=True, check=False
    )
    assert done.stderr == bare.stderr


def test_ranks_are_told_apart(tmp_path):
    run(tmp_path, "raise torch.OutOfMemoryError('x')", RANK="1")
    run(tmp_path, "raise KeyError(1)")
    assert (
        collect(str(tmp_path), 0) == "[rank 1]\ntorch.OutOfMemoryError: x\n\n[other]\nKeyError: 1"
    )


def test_a_sitecustomize_that_was_there_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('the site speaks')")
    done = run(
        tmp_path,
        "import sitecustomize; print(sitecustomize.__file__)",
        PYTHONPATH=f"{PATH}:{tmp_path}",
    )
    assert done.stdout.splitlines() == ["the site speaks", str(tmp_path / "sitecustomize.py")]


def test_nothing_that_a_job_writes_there_is_believed(tmp_path):
    (tmp_path / "1.json").write_text("[]")
    (tmp_path / "2.json").write_text('{"at": "x"}')
    (tmp_path / "3.json").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "4.json")
    (tmp_path / "5.json").write_text(
        '{"at": 1, "pid": 5, "rank": "0]\\n[main", "chain": ["a\\n\\n[main]\\nb"]}'
    )
    assert collect(str(tmp_path), 5) == "[main]\na | [main] | b"


def test_a_jail_tells_it(make):
    rig = make("bubblewrap")
    rig.run("python3", "-c", TORCH + "raise torch.OutOfMemoryError('CUDA out of memory')")
    evidence = rig.exited(1).evidence
    assert evidence.exception == "[main]\ntorch.OutOfMemoryError: CUDA out of memory"
    assert oom_kind(evidence) is OomKind.GPU


def test_a_plain_process_tells_it_too(make):
    rig = make("process")
    rig.run("bash", "-c", 'python3 -c "$0"; exit 1', TORCH + "raise torch.OutOfMemoryError('x')")
    assert rig.exited(1).evidence.exception == "[other]\ntorch.OutOfMemoryError: x"
