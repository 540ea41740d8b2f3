"""One rank of `plugsft.train(ranks=...)`: python -m plugsft.api.rank FOLDER."""

import json
import os
import pickle
import signal
import sys
import threading
import traceback
from pathlib import Path

from ..base.errors import PlugsftError
from ..commands.refusals import quiet_libraries, refusal_of
from ..commands.runs.resume import Resume
from ..commands.train import train_recipe
from ..registry.load import resolve
from .processes import ERROR, JOB


def main(folder: Path) -> int:
    """Train; write this rank's error for the process that started the ranks."""
    os.dup2(1, 2)  # the launcher's own messages stay apart
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    quiet_libraries()
    job = json.loads((folder / JOB).read_text())
    try:
        recipe, active = resolve(job["tables"], (), job["path"])
        options = job["start"]
        start = Resume(**options | {"path": options["path"] and Path(options["path"])})
        train_recipe(recipe, active, Path(job["path"]), start)
    except BaseException as error:
        (folder / ERROR.format(os.environ["RANK"])).write_bytes(_pickled(error))
        return getattr(error, "exit_code", 1)
    return 0


def _stop_with_parent() -> None:
    """Stop in order once the calling process closes the pipe, or ends."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)


def _pickled(error: BaseException) -> bytes:
    """Return an error's bytes; add a traceback to unexpected errors."""
    refused = refusal_of(error) if isinstance(error, OSError) else None
    error = refused or error
    trace = "".join(traceback.format_exception(error))
    if not isinstance(error, PlugsftError | KeyboardInterrupt):
        error.add_note(f"on rank {os.environ['RANK']}:\n{trace}")
    try:
        pickle.loads(data := pickle.dumps(error))
    except Exception:  # whatever a plugin's error holds
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}\n{trace}"))
    return data


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
