"""Uploads during the training: a thread that runs `plugsft export`."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from plugsft import child_environment, say

LAUNCHERS = (
    *("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_"),
    *("ACCELERATE_", "FSDP_", "SLURM_"),
)
"""Variables of a launcher begin so; the process that uploads is no rank."""
REPORT_SECONDS = 60.0
"""The longest wait for the run's report, before its model is uploaded without the last figures."""


class Uploads:
    """The uploads of a run, one at a time; the newest checkpoint waits.

    Each upload has a folder of hard links, so that the run may remove the original. A resumed run
    finds the folders that were not uploaded. The thread is no daemon: the process ends after its
    last upload.
    """

    def __init__(self, output: Path, name: str, options: list[str], wait: float) -> None:
        self._output, self._name, self._options, self._wait = output, name, options, wait
        self._folder = output / "push"  # models that are not uploaded yet
        self._lock = threading.Lock()
        self._waiting: Path | None = None
        self._current: Path | None = None
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._ended, self._gave_up = threading.Event(), threading.Event()
        self._uploaded, self._failed, self._last = 0, 0, ""

    def resume(self, step: int) -> None:
        """Upload what an earlier process of this run has not.

        A run that begins at step 1 removes what an earlier run left.
        """
        if not step:
            shutil.rmtree(self._folder, ignore_errors=True)
        left = sorted(self._folder.glob("[!.]*"))
        for newest in left[-1:]:
            say(f"push: {newest.name} was not uploaded before; it is now")
            self._start(newest)

    def add(self, folder: Path) -> None:
        """Upload a checkpoint or the model after the upload before."""
        self._start(link_copy(folder, self._folder / folder.name))

    def end(self, wait: bool) -> None:
        """Wait for the last upload of a completed run; end that of any other."""
        self._ended.set()
        if not self._thread or not self._thread.is_alive():
            return
        if wait:
            say(
                f"push: the process waits at most {self._wait / 60:g} minutes for the last upload, "
                f"which this does later: {self._command()}"
            )
            timer = threading.Timer(self._wait, self._give_up)
            timer.daemon = True  # it must not keep the process that has nothing left to upload
            timer.start()
        else:
            self._give_up()

    def describe(self) -> str:
        """Report what has arrived, in one line."""
        arrived = f", {self._uploaded} so far, the last one {self._last}" if self._uploaded else ""
        failed = f", {self._failed} failed" if self._failed else ""
        return f"uploads to {self._name}{arrived}{failed}"

    def _start(self, copy: Path) -> None:
        with self._lock:
            self._waiting = copy
            for older in {*self._folder.glob("[!.]*")} - {copy, self._current}:
                shutil.rmtree(older, ignore_errors=True)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="push")
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                copy = self._current = self._waiting
                self._waiting = None
                if copy is None or self._gave_up.is_set():
                    self._thread = None
                    break
            self._upload(copy)
        if copy is not None:
            self._say_later(copy.name, "the run ended")

    def _upload(self, copy: Path) -> None:
        """Upload a copy, and remove it; keep a failed checkpoint for a resume."""
        is_model = copy.name == "model"
        if is_model:
            self._wait_for_report()
        error = "the run ended" if self._gave_up.is_set() else self._run(copy)
        if error is None:
            self._uploaded, self._last = self._uploaded + 1, copy.name
        else:
            self._failed += 1
            self._say_later(copy.name, error)
        if error is None or is_model:
            shutil.rmtree(copy, ignore_errors=True)
            with suppress(OSError):
                self._folder.rmdir()

    def _run(self, copy: Path) -> str | None:
        """Run `plugsft export`, and print its lines; return why it failed, if so."""
        words = ["export", str(copy), "--to", f"hub:{self._name}", *self._options]
        command = [sys.executable, "-m", "plugsft", *words]
        environment = {
            name: value
            for name, value in child_environment().items()
            if not name.startswith(LAUNCHERS)
        }
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            ) as process,
        ):
            self._process = process
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, 10)
            assert process.stdout
            for line in process.stdout:
                say(f"push: {line.rstrip()}")
            code, self._process = process.wait(), None
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [f"exit code {code}"])[-1]
        if self._gave_up.is_set():
            return "the time to wait is over" if code else None
        return last if code else None

    def _give_up(self) -> None:
        """End the upload: the time is over."""
        self._gave_up.set()
        process = self._process
        if process is not None:
            process.terminate()

    def _wait_for_report(self) -> None:
        """Wait until run.json has the last figures for the card."""
        while not self._ended.wait(1.0):
            if not threading.main_thread().is_alive():
                return
        end = time.monotonic() + REPORT_SECONDS
        while not (self._output / "report.html").exists() and time.monotonic() < end:
            if self._gave_up.wait(0.1):
                return

    def _say_later(self, name: str, reason: str) -> None:
        say(f"warning: push: {name} was not uploaded: {reason}. Upload it with: {self._command()}")

    def _command(self) -> str:
        """Return the command that uploads later."""
        options = "".join(f" {option}" for option in self._options)
        return f"plugsft export {shlex.quote(str(self._output))} --to hub:{self._name}{options}"


def link_copy(folder: Path, copy: Path) -> Path:
    """Copy a folder with hard links, or bytes where links are impossible; return it."""
    building = copy.with_name(f".{copy.name}.tmp")
    for old in (building, copy):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(folder, building, copy_function=_link)
    building.rename(copy)
    return copy


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
