"""The processes and the results of gpu.py: time limits, and what is measured already."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import shared

QUIET = {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
SETTINGS = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
}
"""The same for all contenders: memory in segments that grow, no cuDNN plan for each length."""


class TimeUp(Exception):
    """The time limit was reached."""


class Failed(Exception):
    """A process ended without a result; the message is the reason."""


@contextmanager
def started(*words: object, log: Path, **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process that writes to a log; kill it with its children at the end."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [*map(str, words)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=SETTINGS | os.environ | QUIET | environment,
            start_new_session=True,
            cwd=log.parent,  # not a clone: its plugsft would hide the installed one
            preexec_fn=shared.end_with_parent,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def follow(
    process: "subprocess.Popen[bytes]", path: Path, deadline: Callable[[], float]
) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines that a process writes, until it ends; raise TimeUp at the deadline."""
    offset = 0
    while True:
        ended = process.poll() is not None
        data = path.read_bytes()[offset:] if path.exists() else b""
        whole = data.rpartition(b"\n")[0]  # the last line may be incomplete
        if whole:
            offset += len(whole) + 1
            yield from map(json.loads, whole.split(b"\n"))
        if ended:
            return
        if time.monotonic() > deadline():
            raise TimeUp
        time.sleep(0.1)


def run_to_end(*words: object, log: Path, end: float, **environment: str) -> None:
    """Run a command; raise Failed or TimeUp."""
    with started(*words, log=log, **environment) as process:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimeUp from None
        if process.returncode:
            raise Failed(explain_failure(log, process.returncode))


def explain_failure(log: Path, code: int) -> str:
    """Return why a process has no result, from its log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if code == 2:
        return "refused: " + " ".join(lines[-6:])
    if any("out of memory" in line.lower() for line in lines):
        return "out of memory"
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return "\n".join([f"{how}: {lines[-1] if lines else 'no output'}", *lines[-15:-1]])[:2000]


class Results:
    """The results of a phase: a JSON file that is written after each of them."""

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        self.path = path
        self.report: dict[str, Any] = {"machine": machine, "results": {}}
        if path.exists():
            self.report = json.loads(path.read_text())
            other = self.report["machine"]["gpu"]
            if other != machine["gpu"]:
                raise SystemExit(
                    f"{path} is of {other}, not of {machine['gpu']}: set another --out"
                )

    @property
    def all(self) -> dict[str, list[dict[str, Any]]]:
        """The results of each name: one for each round."""
        results: dict[str, list[dict[str, Any]]] = self.report["results"]
        return results

    def missing(self, name: str, rounds: int = 1) -> bool:
        """Whether a name has fewer rounds, and did not fail."""
        results = self.all.get(name, [])
        return len(results) < rounds and not any("reason" in result for result in results)

    def add(self, name: str, result: dict[str, Any]) -> None:
        """Add a result, and write the file."""
        self.all.setdefault(name, []).append(result)
        self.write()

    def write(self) -> None:
        """Write the file at once: a kill leaves the old or the new one."""
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.report, indent=1) + "\n")
        temporary.replace(self.path)
