"""Shared by tests of plugins: distributions, installed by pip or written by hand."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path


def install(source: Path, target: Path) -> Path:
    """Install a distribution with pip, for real and without network; return where to."""
    # pip builds in the folder of the source, which stays as it is.
    copy = shutil.copytree(source, target.parent / f"{target.name}-source")
    how = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", *how, "--target", target, copy],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return target


def write_plugin(folder: Path, name: str, code: str, module: str | None = None) -> Path:
    """Write what an installed distribution consists of: a module, and its entry point."""
    module = module or f"module_{name}"
    head = "from plugsft import hookimpl, plugin, state\n\n"
    info = folder / f"dist_{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(head + textwrap.dedent(code), encoding="utf8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[plugsft]\n{name} = {module}\n")
    return folder


def run_fresh(site: Path, *command: object, cwd: Path | None = None):
    """Run `python -m COMMAND` in a new interpreter that looks into a folder, as a user's would."""
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=cwd or site,
        capture_output=True,
        text=True,
    )
