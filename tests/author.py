"""Shared by tests of plugins: packages, installed by pip or written by hand."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path


def install(*sources: Path, target: Path) -> Path:
    """Install packages with pip, without network; return the target folder."""
    # pip builds inside the source folder, so build in a copy.
    copies = [
        shutil.copytree(source, target.parent / f"{target.name}-sources" / source.name)
        for source in sources
    ]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    process = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", *options, "--target", target, *copies],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return target


def write_plugin(folder: Path, name: str, code: str, module: str | None = None) -> Path:
    """Write an installed package: a module, and its entry point."""
    module = module or f"module_{name}"
    head = "from plugsft import hookimpl, plugin, state\n\n"
    info = folder / f"dist_{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(head + textwrap.dedent(code), encoding="utf8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[plugsft]\n{name} = {module}\n")
    return folder


def run_fresh(site: Path, *command: object, cwd: Path | None = None):
    """Run `python -m COMMAND` in a new interpreter, with a folder on its path."""
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=cwd or site,
        capture_output=True,
        text=True,
    )
