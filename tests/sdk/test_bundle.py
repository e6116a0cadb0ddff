"""The bundle: what an image lacks it gets, what it has wins, and nothing ever stops Python."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import dure_sdk
from dure_sdk import bundle

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"


def wheel(folder: Path, name: str, version: str, **files: str) -> None:
    """A small wheel, so that pip needs no index."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as z:
        for file, text in files.items():
            z.writestr(f"{file}.py", text)
        z.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        z.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        z.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Built by pip from local wheels; test_from_the_index builds from the real index."""
    folder = tmp_path_factory.mktemp("bundle")
    wheels = folder / "wheels"
    wheels.mkdir()
    wheel(wheels, "psutil", "7.0", psutil="WHOSE = 'bundle'\n__version__ = '7.0'")
    wheel(wheels, "nvidia-ml-py", "13.0", pynvml="WHOSE = 'bundle'", example="raise SystemExit")
    options = ("--no-index", f"--find-links={wheels}")
    return bundle.build(folder / "b", ("3.9", VERSION), pip_options=options).folder


def image(tmp_path: Path) -> Path:
    """A bare Python, as an image without any of the packages has it."""
    home = tmp_path / "image"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    return home / "bin" / "python"


def site(python: Path) -> Path:
    return next(python.parent.parent.glob("lib/python*/site-packages"))


def run(python: Path | str, boot: Path | None, code: str, *options: str, env=None):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "DURE"))}
    full = {**clean, **({"PYTHONPATH": str(boot)} if boot else {}), **(env or {})}
    return subprocess.run(
        [str(python), *options, "-c", code],
        env=full,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_image_without_psutil_gets_it(made, tmp_path):
    done = run(image(tmp_path), made / "boot", "import psutil, pynvml; print(psutil.WHOSE)")
    assert done.stdout == "bundle\n", done.stderr


def test_image_with_its_own_keeps_its_own(made, tmp_path):
    python = image(tmp_path)
    (site(python) / "psutil.py").write_text("WHOSE = 'image'")
    code = "import psutil, pynvml; print(psutil.WHOSE, pynvml.WHOSE)"
    assert run(python, made / "boot", code).stdout == "image bundle\n"


def test_sdk_comes_with_it_and_knows_what_was_injected(made, tmp_path):
    python = image(tmp_path)
    (site(python) / "psutil.py").write_text("WHOSE = 'image'")
    code = (
        "import psutil, pynvml; from dure_sdk import versions; "
        "print(versions.tags()['dure.sysmetrics.deps'])"
    )
    assert run(python, made / "boot", code).stdout == "mixed\n"


def test_shadowed_sitecustomize_still_runs(made, tmp_path):
    python = image(tmp_path)
    (site(python) / "sitecustomize.py").write_text("import sys; sys.own = __file__")
    done = run(
        python, made / "boot", "import sys, psutil, sitecustomize as s; print(sys.own, s.__file__)"
    )
    assert done.stdout.split() == [str(site(python) / "sitecustomize.py")] * 2, done.stderr


def test_shadowed_one_fails_as_it_would_alone(made, tmp_path):
    python = image(tmp_path)
    (site(python) / "sitecustomize.py").write_text("1 / 0")
    alone = run(python, None, "print('on')")
    both = run(python, made / "boot", "print('on')")
    assert (both.returncode, both.stdout) == (alone.returncode, alone.stdout) == (0, "on\n")
    assert "ZeroDivisionError" in alone.stderr
    assert "ZeroDivisionError" in both.stderr


def test_chain_of_two_bundles_ends(made, tmp_path):
    """The same folder twice on the path: no loop."""
    path = os.pathsep.join([str(made / "boot")] * 2 + [str(made / "boot") + "/"])
    done = run(image(tmp_path), None, "print('on')", env={"PYTHONPATH": path})
    assert (done.returncode, done.stdout, done.stderr) == (0, "on\n", "")


@pytest.mark.parametrize("harm", ["no deps", "deps is a file", "psutil broken", "unreadable boot"])
def test_broken_bundle_never_stops_python(made, tmp_path, harm):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(made, broken)
    if harm in {"no deps", "deps is a file"}:
        shutil.rmtree(broken / "deps")
    if harm == "deps is a file":
        (broken / "deps").write_text("")
    if harm == "psutil broken":
        for path in broken.glob("deps/*/psutil.py"):
            path.write_text("raise SystemExit(9)")
    if harm == "unreadable boot":
        (broken / "boot" / "sitecustomize.py").write_bytes(b"\x00\xff not python")
    done = run(image(tmp_path), broken / "boot", "print('on')")
    assert (done.returncode, done.stdout) == (0, "on\n")


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_pythons_that_ignore_it_go_on_without(made, tmp_path, option):
    assert run(image(tmp_path), made / "boot", "print('on')", option).stdout == "on\n"


def test_stray_example_is_left_out(made):
    assert not list(made.glob("deps/*/example.py"))
    assert list(made.glob("deps/*/pynvml.py"))


def test_start_costs_under_a_millisecond(made, tmp_path):
    """CPU time of the file itself, the best of some runs: the machine may be busy."""
    python = image(tmp_path)
    code = (
        "import time, sys; s = open(sys.argv[1]).read(); c = compile(s, sys.argv[1], 'exec')\n"
        "def once():\n"
        "    t = time.process_time(); exec(c, {'__file__': sys.argv[1], '__name__': 'x'})\n"
        "    return time.process_time() - t\n"
        "print(min(once() for _ in range(20)))"
    )
    path = str(made / "boot" / "sitecustomize.py")
    done = subprocess.run([python, "-c", code, path], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.001


def test_rebuild_replaces_the_whole(made, tmp_path):
    wheels = made.parent / "wheels"
    options = ("--no-index", f"--find-links={wheels}")
    target = tmp_path / "b"
    bundle.build(target, (VERSION,), pip_options=options)
    assert not list(target.rglob("__pycache__"))
    (target / "deps" / "junk").write_text("")
    bundle.build(target, (VERSION,), pip_options=options)
    assert not (target / "deps" / "junk").exists()
    assert [p.name for p in target.parent.iterdir() if p.name.startswith(".")] == []


def test_what_cannot_be_had_is_said_and_the_old_bundle_stays(made, tmp_path):
    target = tmp_path / "b"
    (target / "deps").mkdir(parents=True)
    (target / "deps" / "old").write_text("")
    with pytest.raises(bundle.BundleError, match=f"psutil.* for Python {VERSION}"):
        bundle.build(target, (VERSION,), pip_options=("--no-index",))
    assert (target / "deps" / "old").exists()


def test_a_folder_with_other_files_is_never_replaced(tmp_path):
    (tmp_path / "keep.txt").write_text("precious")
    with pytest.raises(bundle.BundleError, match="holds other files"):
        bundle.build(tmp_path, (VERSION,), pip_options=("--no-index",))
    assert (tmp_path / "keep.txt").read_text() == "precious"


def test_mlflow_is_left_out_where_it_cannot_be_had(made, tmp_path):
    options = ("--no-index", f"--find-links={made.parent / 'wheels'}")
    got = bundle.build(tmp_path / "b", (VERSION,), mlflow=True, pip_options=options)
    assert "mlflow-skinny" in got.left_out[VERSION]


def test_from_the_index(tmp_path):
    """Real wheels for the oldest and the newest Python; only this test needs the index."""
    began = time.monotonic()
    got = bundle.build(tmp_path / "b", ("3.9", "3.14"))
    assert time.monotonic() - began < 100
    for name in ("cp39", "cp314"):
        deps = got.folder / "deps" / name
        assert list(deps.glob("psutil/_psutil_linux*.so"))
        assert (deps / "pynvml.py").is_file()
        assert not (deps / "example.py").exists()
        assert (deps / "dure_sdk" / "tracking.py").is_file()


def test_boot_file_is_valid_for_old_pythons():
    """No f-strings, no annotations: an old interpreter in an image must be able to read it."""
    import ast

    path = Path(dure_sdk.__file__).parent / "boot" / "sitecustomize.py"
    tree = ast.parse(path.read_text(), feature_version=(3, 4))
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.JoinedStr | ast.NamedExpr)]
