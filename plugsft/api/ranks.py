"""Several ranks on this machine for `plugsft.api.train(ranks=...)`: started, followed, and ended.

Each rank is `python -m plugsft.api.ranks FOLDER`, below the launcher that `plugsft launch` uses.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

import psutil

from ..base.errors import LaunchError
from ..base.for_commands import quiet_libraries, refusal_of
from ..base.launch_files import Layout
from ..base.machine import child_environment
from ..base.sending import sendable
from ..recipe.tables import Recipe
from ..registry.active import Active
from ..registry.discover import ensure_importable
from ..registry.load import resolve
from ..start.launch import is_rank, on_cpu
from ..start.train import Start, train_recipe
from .recipes import Source

JOB, ERROR, OUTPUT, MESSAGES = "job.pickle", "error-{}.pickle", "output.txt", "launcher.txt"
PAUSE = 0.1
"""Seconds between two looks at the ranks' output."""
SHOWN = 20
"""Lines of the launcher's own messages in an error."""


def train_on_ranks(
    source: Source, recipe: Recipe, active: Active, ranks: int, start: Start
) -> None:
    """Train with several processes; print their output, raise their error."""
    for name, plugin in source.own.items():
        ensure_importable(name, plugin.target)
    if ranks < 1:
        raise LaunchError(f"ranks={ranks}: give 1 or more")
    if is_rank():
        raise LaunchError(f"ranks={ranks}: this process is a rank of a launcher; leave ranks out")
    layout = Layout(ranks, cpu=on_cpu(recipe, ranks, "ranks"))
    with TemporaryDirectory(prefix="plugsft-ranks-") as temporary:
        folder = Path(temporary)
        # Only this user may enter the folder; what it holds is our own.
        job = source.tables | {"plugins": recipe.plugins}, source.path, start
        (folder / JOB).write_bytes(pickle.dumps(job))
        code = _launch(folder, layout)
        found = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob(ERROR.format("*")))]
        if found:  # the errors of other ranks name the first
            raise min(found, key=lambda error: type(error).__name__ == "PeerError")
        if code:
            messages = (folder / MESSAGES).read_text(errors="replace").splitlines()
            raise LaunchError(
                f"ranks={ranks}: the ranks ended with exit code {code}, without a reason:\n"
                + "\n".join(messages[-SHOWN:])
            )


def _launch(folder: Path, layout: Layout) -> int:
    """Run the launcher; print the output of the ranks; return the exit code."""
    words = ["plugsft.start.run_accelerate", *layout.options(), "-m", __name__, str(folder)]
    # With '' on its path, a notebook imports from its own folder.
    path = os.pathsep.join(place or os.getcwd() for place in sys.path)
    # Into files: a pipe would break if this process were killed, and fail the ranks.
    with (folder / OUTPUT).open("wb") as output, (folder / MESSAGES).open("wb") as messages:
        launcher = subprocess.Popen(
            [sys.executable, "-m", *words],
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


def main(folder: Path) -> int:
    """Train as one rank; write its error for the process that started the ranks."""
    os.dup2(1, 2)  # the launcher's own messages stay apart
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    quiet_libraries()
    tables, path, start = pickle.loads((folder / JOB).read_bytes())
    try:
        recipe, active = resolve(tables, (), path)
        train_recipe(recipe, active, path, start)
    except BaseException as error:
        rank = os.environ["RANK"]
        told = sendable(refusal_of(error) or error, f"on rank {rank}")
        (folder / ERROR.format(rank)).write_bytes(pickle.dumps(told))
        return getattr(error, "exit_code", 1)
    return 0


def _stop_with_parent() -> None:
    """Stop in order once the calling process closes the pipe, or ends."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
