"""Uploads beside the training: a thread that waits for `plugsft export` in a process."""

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

from plugsft import say

FOLDER = "push"
"""Folder in the output for what is not uploaded yet."""
LAUNCHERS = (
    *("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_"),
    *("ACCELERATE_", "FSDP_", "SLURM_"),
)
"""Variables of a launcher begin so; the process that uploads is no rank."""
REPORT_SECONDS = 60.0
"""The longest wait for the run's report, before its model is uploaded without the last figures."""
PATIENCE = 600.0
"""Least seconds of pauses while the hub does not answer."""
NICE = 10


class Uploads:
    """The uploads of a run, one at a time; a newer checkpoint replaces one that waits.

    Hard links hold what is uploaded, so that the run may remove the original, and a resumed run
    finds what was not uploaded. The thread is no daemon: the process ends after its last upload.
    """

    def __init__(self, output: Path, name: str, options: list[str], wait: float) -> None:
        self._output, self._name, self._options, self._wait = output, name, options, wait
        self._folder = output / FOLDER
        self._lock = threading.Lock()
        self._waiting: Path | None = None
        self._current: Path | None = None
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._ended, self._gave_up = threading.Event(), threading.Event()
        self._uploaded, self._failed, self._last = 0, 0, ""

    def resume(self, step: int) -> None:
        """Upload what an earlier process of this run has not; remove that of an earlier run."""
        if not step:
            shutil.rmtree(self._folder, ignore_errors=True)
        left = sorted(self._folder.glob("[!.]*"))
        for newest in left[-1:]:
            say(f"push: {newest.name} was not uploaded before; it is now")
            self._start(newest)

    def add(self, folder: Path) -> None:
        """Upload a checkpoint or the model as soon as the upload before has ended."""
        self._start(hold(folder, self._folder / folder.name))

    def end(self, wait: bool) -> None:
        """Wait so many seconds for what is left, once the run has ended; or end it now."""
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

    def _start(self, held: Path) -> None:
        with self._lock:
            self._waiting = held
            for older in {*self._folder.glob("[!.]*")} - {held, self._current}:
                shutil.rmtree(older, ignore_errors=True)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="push")
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                held = self._current = self._waiting
                self._waiting = None
                if held is None or self._gave_up.is_set():
                    self._thread = None
                    break
            self._upload(held)
        if held is not None:
            self._say_later(held.name, "the run ended")

    def _upload(self, held: Path) -> None:
        """Upload what is held, and remove it; keep a checkpoint that failed, for a resume."""
        is_model = held.name == "model"
        if is_model:
            self._wait_for_report()
        error = "the run ended" if self._gave_up.is_set() else self._run(held)
        if error is None:
            self._uploaded, self._last = self._uploaded + 1, held.name
        else:
            self._failed += 1
            self._say_later(held.name, error)
        if error is None or is_model:
            shutil.rmtree(held, ignore_errors=True)
            with suppress(OSError):
                self._folder.rmdir()

    def _run(self, held: Path) -> str | None:
        """Run `plugsft export`; print its lines; return why it failed, if so."""
        patience = round(max(self._wait, PATIENCE))
        words = ["export", held, "--to", f"hub:{self._name}", "--patience", patience]
        words += [*self._options, "--without", "push"]
        command = [sys.executable, "-m", "plugsft", *map(str, words)]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)
        }
        with tempfile.TemporaryFile("w+") as errors:
            self._process = process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
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
        """Wait until the run has ended, and its record has the last figures for the card."""
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


def hold(folder: Path, held: Path) -> Path:
    """Link all files of a folder, or copy them where there are no links; return the new folder."""
    building = held.with_name(f".{held.name}.tmp")
    for old in (building, held):
        shutil.rmtree(old, ignore_errors=True)
    building.mkdir(parents=True)
    for path in folder.rglob("*"):
        target = building / path.relative_to(folder)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target)
        except OSError:
            shutil.copy2(path, target)
    building.rename(held)
    return held
