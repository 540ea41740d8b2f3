"""Several ranks on this machine for `plugsft.train(ranks=...)`: started, heard, and ended."""

import json
import os
import pickle
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

import psutil

from ..base.errors import LaunchError
from ..base.launch_files import Layout
from ..base.machine import child_environment
from ..commands.launch_ranks import on_cpu
from ..commands.runs.inputs import check_inputs
from ..commands.runs.resume import Resume
from ..recipe.tables import Recipe
from ..registry.active import Active
from ..registry.discover import ensure_importable
from .recipes import Source

JOB, ERROR = "job.json", "error-{}.pickle"
OUTPUT, MESSAGES = "output.txt", "launcher.txt"
PAUSE = 0.1
"""Seconds between two looks at the ranks' output."""
SHOWN = 20
"""Lines of the launcher's own messages in an error."""


def train_on_ranks(
    source: Source,
    recipe: Recipe,
    active: Active,
    ranks: int,
    start: Resume,
) -> None:
    """Train with several processes; print their output, raise their error."""
    for name, plugin in source.own.items():
        ensure_importable(name, plugin.target)
    if "RANK" in os.environ:
        raise LaunchError(
            f"ranks={ranks}: a launcher has started this process as a rank already; leave ranks out"
        )
    if ranks < 1:
        raise LaunchError(f"ranks={ranks}: give 1 or more")
    check_inputs(recipe, active, source.path)
    with TemporaryDirectory(prefix="plugsft-ranks-") as temporary:
        folder = Path(temporary)
        job = {
            "tables": source.tables | {"plugins": recipe.plugins},
            "path": str(source.path),
            "start": asdict(start) | {"path": start.path and str(start.path)},
        }
        (folder / JOB).write_text(json.dumps(job))
        layout = Layout(ranks, cpu=on_cpu(recipe, ranks, "ranks"))
        code = _launch(folder, layout)
        if error := _read_error(folder, ranks):
            raise error
        if code:
            messages = (folder / MESSAGES).read_text(errors="replace").splitlines()
            raise LaunchError(
                f"ranks={ranks}: the ranks ended with exit code {code}, without a reason:\n"
                + "\n".join(messages[-SHOWN:])
            )


def _launch(folder: Path, layout: Layout) -> int:
    """Run the launcher; print the output of the ranks; return the exit code."""
    words = ["accelerate.commands.launch", *layout.options()]
    # With '' on its path, a notebook imports from its own folder.
    path = os.pathsep.join(place or os.getcwd() for place in sys.path)
    # Into files: a pipe would break if this process were killed, and fail the ranks.
    with (folder / OUTPUT).open("wb") as output, (folder / MESSAGES).open("wb") as messages:
        launcher = subprocess.Popen(
            [sys.executable, "-m", *words, "-m", "plugsft.api.rank", str(folder)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=messages,
            env={"PLUGSFT_PROGRESS_SECONDS": "5", **child_environment(PYTHONPATH=path)},
            # Ctrl-C reaches this process only, which then ends the ranks in order.
            start_new_session=True,
        )
    assert launcher.stdin
    with (folder / OUTPUT).open(errors="replace") as lines, launcher.stdin as pipe:
        try:
            _follow(launcher, lines)
        except KeyboardInterrupt:
            pipe.close()  # each rank reads this end, and stops after its step
            _follow(launcher, lines)
            if not [*folder.glob(ERROR.format("*"))]:
                raise
        finally:
            if launcher.poll() is None:  # at a second Ctrl-C
                for rank in psutil.Process(launcher.pid).children(recursive=True):
                    rank.kill()
                launcher.kill()
                launcher.wait()
    return launcher.returncode


def _follow(launcher: "subprocess.Popen[bytes]", lines: TextIO) -> None:
    """Print new lines of the ranks until the launcher has ended."""
    running = True
    while running:
        running = launcher.poll() is None
        if text := lines.read():
            print(text, end="", flush=True)
        elif running:
            time.sleep(PAUSE)


def _read_error(folder: Path, ranks: int) -> BaseException | None:
    """Return the error that ended the run; those of other ranks name it."""
    errors = []
    for rank in range(ranks):
        path = folder / ERROR.format(rank)
        if path.exists():
            # Written by our own ranks, in a folder that only this user may enter.
            errors.append(pickle.loads(path.read_bytes()))
    return min(errors, key=lambda error: type(error).__name__ == "PeerError", default=None)
