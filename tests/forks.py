"""Forks of a process that has imported everything, so programs start without import time.

This module imports no tests, because each fork imports it to find its function.
"""

import io
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path

from plugsft import cli
from plugsft.base import console
from plugsft.lab import trials

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["preloaded"])
FORK_TRIALS = "PLUGSFT_TESTS_FORK_TRIALS"


def start_fork_server() -> None:
    """Start the fork server, if it does not run yet, with tests/ on its path."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [before])]
    )
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


class Running:
    """A started `plugsft` process."""

    def __init__(
        self, arguments: tuple[object, ...], env: dict[str, str], cwd: Path, typed: str = ""
    ) -> None:
        self._files = Path(tempfile.mkdtemp())
        self._out, self._err = (self._files / name for name in ("out", "err"))
        (self._files / "in").write_text(typed)
        words = list(map(str, arguments))
        child_arguments = (words, {**os.environ, **env}, str(cwd), str(self._files))
        start_fork_server()
        self.process = FORKS.Process(target=run_program, args=child_arguments)
        self.process.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def output(self) -> str:
        """Return what it has printed so far."""
        return self._out.read_text() if self._out.exists() else ""

    def wait(self, timeout: float = 300) -> "subprocess.CompletedProcess[str]":
        """Wait for its end; return its exit code and output."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            raise TimeoutError(self._out.read_text() + self._err.read_text())
        texts = [path.read_text() if path.exists() else "" for path in (self._out, self._err)]
        shutil.rmtree(self._files)
        return subprocess.CompletedProcess([], self.process.exitcode, *texts)


def run_program(words: list[str], env: dict[str, str], cwd: str, files: str) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    os.dup2(os.open(f"{files}/in", os.O_RDONLY), 0)
    sys.stdin = io.TextIOWrapper(io.FileIO(0))  # multiprocessing has set it to /dev/null
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{files}/{name}", os.O_WRONLY | os.O_CREAT), number)
    console.out.quiet = env.get("RANK", "0") != "0"
    cli.MAIN_FIRST = 1.0  # no launcher ends the other ranks here: each of them waits this long
    if FORK_TRIALS in env:
        trials.run_process = run_fork
        # A fork uses this server: one of its own would import everything again.
        forkserver._forkserver.ensure_running = lambda: None
    if words[:1] == ["-m"] and words[1] != "plugsft":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        cli.main(words[2:] if words[:1] == ["-m"] else words)


def run_fork(words: list[str], output_file: Path, **environment: str) -> tuple[int, float]:
    """Replace plugsft.lab.trials.run_process: run in a fork, not in a fresh process."""
    python, option, module, *arguments = words
    assert (python, option) == (sys.executable, "-m"), words
    started = time.perf_counter()
    child_arguments = (
        module,
        arguments,
        {**os.environ, **environment},
        os.getcwd(),
        str(output_file),
    )
    process = FORKS.Process(target=run_module, args=child_arguments)
    process.start()
    process.join()
    return process.exitcode, time.perf_counter() - started


def run_module(
    module: str, arguments: list[str], env: dict[str, str], cwd: str, output_file: str
) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    file = os.open(output_file, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
