"""Several ranks on this machine for `plugsft.train(ranks=...)`: started, heard, and ended."""

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ..base.errors import LaunchError
from ..recipe.tables import Recipe
from ..registry.discover import ensure_importable
from .recipes import Source

SETTINGS = {
    "compute_environment": "LOCAL_MACHINE",
    # With MULTI_CPU, accelerate would start one process.
    "distributed_type": "MULTI_GPU",
    "num_machines": 1,
    "machine_rank": 0,
    "main_process_port": 0,
    "mixed_precision": "no",
    "main_training_function": "main",
}
"""The launcher's settings; port 0 is any free one."""
JOB, ERROR = "job.json", "error-{}.pickle"
SHOWN = 20
"""Lines of the launcher's own messages in an error."""


def train_on_ranks(
    source: Source, recipe: Recipe, ranks: int, start: tuple[bool, bool, Path | None, bool]
) -> None:
    """Train with `ranks` processes of this machine; print their output, raise their error."""
    for name, plugin in source.own.items():
        ensure_importable(name, plugin.target)
    if "RANK" in os.environ:
        raise LaunchError(
            f"ranks={ranks}: a launcher has started this process as a rank already; leave ranks out"
        )
    if ranks < 1:
        raise LaunchError(f"ranks={ranks}: give 1 or more")
    with TemporaryDirectory(prefix="plugsft-ranks-") as temporary:
        folder = Path(temporary)
        job = {
            "tables": source.tables | {"plugins": recipe.plugins},
            "path": str(source.path),
            "start": [*start[:2], start[2] and str(start[2]), start[3]],
        }
        (folder / JOB).write_text(json.dumps(job))
        settings = SETTINGS | {"num_processes": ranks, "use_cpu": _on_cpu(recipe, ranks)}
        (folder / "launch.yaml").write_text(json.dumps(settings))  # JSON is YAML
        code, messages = _launch(folder)
        if error := _read_error(folder, ranks):
            raise error
        if code:
            raise LaunchError(
                f"ranks={ranks}: the ranks ended with exit code {code}, without a reason:\n"
                + "\n".join(messages[-SHOWN:])
            )


def _on_cpu(recipe: Recipe, ranks: int) -> bool:
    """Tell whether ranks run on the CPU; refuse more ranks than GPUs."""
    if recipe.device == "cpu" or not torch.cuda.is_available():
        return True
    if ranks > (gpus := torch.cuda.device_count()):
        raise LaunchError(f"ranks={ranks}: there are {gpus} GPUs; one rank needs one")
    return False


def _launch(folder: Path) -> tuple[int, list[str]]:
    """Run the launcher; return its exit code and its own messages."""
    words = ["accelerate.commands.launch", "--config_file", str(folder / "launch.yaml")]
    # With '' on its path, a notebook imports from its own folder.
    path = os.pathsep.join(place or os.getcwd() for place in sys.path)
    messages: list[str] = []
    # A session of its own: Ctrl-C reaches this process only, which then ends the ranks in order.
    with subprocess.Popen(
        [sys.executable, "-P", "-m", *words, "-m", "plugsft.api.rank", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path, "PLUGSFT_PROGRESS_SECONDS": "5"},
        start_new_session=True,
        text=True,
        errors="replace",
    ) as launcher:
        assert launcher.stdin and launcher.stdout and launcher.stderr
        reader = threading.Thread(target=lambda: messages.extend(launcher.stderr or ()))
        reader.start()
        try:
            with _ending(launcher):
                for line in launcher.stdout:
                    print(line, end="", flush=True)
        finally:
            reader.join()
    return launcher.returncode, messages


@contextmanager
def _ending(launcher: "subprocess.Popen[str]") -> Iterator[None]:
    """At Ctrl-C, end the ranks in order; at a second one, at once."""
    assert launcher.stdin and launcher.stdout
    try:
        yield
    except BaseException:
        launcher.stdin.close()  # each rank reads this end, and stops after its step
        try:
            for line in launcher.stdout:
                print(line, end="", flush=True)
            launcher.wait()
        except BaseException:
            os.killpg(launcher.pid, 9)
            raise


def _read_error(folder: Path, ranks: int) -> BaseException | None:
    """Return the error that ended the run; the other ranks have one that names it."""
    errors = []
    for rank in range(ranks):
        path = folder / ERROR.format(rank)
        if path.exists():
            # Written by our own ranks, in a folder that only this user may enter.
            errors.append(pickle.loads(path.read_bytes()))
    return min(errors, key=lambda error: type(error).__name__ == "PeerError", default=None)
