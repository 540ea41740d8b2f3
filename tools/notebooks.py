"""Run the notebooks of docs/, and store their outputs: tools/notebooks.py [FILES].

Needs the extra `dev`. Each notebook runs in an empty folder, in a kernel of this Python.
"""

import hashlib
import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs/notebooks"
LIMIT = 600
"""Seconds that a cell, or the start of the kernel, may take."""


def execute(path: Path, folder: Path) -> Any:
    """Run a notebook in `folder`, and return it; raise a cell's first error."""
    with _own_settings():
        import nbformat
        from nbclient import NotebookClient

        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            cell.metadata.clear()
        client = NotebookClient(
            notebook,
            timeout=LIMIT,
            startup_timeout=LIMIT,
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
        )
        return client.execute()


def clean(notebook: Any) -> Any:
    """Remove times and random names; add the digest of the code."""
    for number, cell in enumerate(notebook.cells):
        cell.metadata.clear()
        for output in cell.get("outputs", ()):
            if page := output.get("data", {}).get("text/html"):
                output["data"]["text/html"] = re.sub(r"T_[0-9a-f]{5}", f"T_{number}", page)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "plugsft": {"outputs_of": code_digest(notebook)},
    }
    return notebook


def code_digest(notebook: Any) -> str:
    """Return a checksum of the code, to tell outputs of other code."""
    sources = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code = "\n\n".join("".join(source) for source in sources)
    return hashlib.sha256(code.encode()).hexdigest()[:16]


@contextmanager
def _own_settings():
    """Use no settings of the user's Jupyter and IPython, and write none."""
    before = dict(os.environ)
    with TemporaryDirectory(prefix="plugsft-jupyter-") as folder:
        names = "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"
        os.environ |= dict.fromkeys(names, folder) | {"JUPYTER_PLATFORM_DIRS": "1"}
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def main(names: list[str]) -> None:
    """Run the notebooks, and write them."""
    import nbformat

    for path in [Path(name) for name in names] or sorted(FOLDER.glob("*.ipynb")):
        print(path.name, flush=True)
        with TemporaryDirectory(prefix="plugsft-notebook-") as folder:
            notebook = clean(execute(path, Path(folder)))
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])
