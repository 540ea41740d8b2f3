"""The notebooks of docs/: their outputs are those of their code, and they run in a real kernel."""

import importlib
import json
import re

import pytest
from conftest import ROOT, only_full, read_metrics

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


@pytest.fixture
def tool(monkeypatch):
    """Give tools/notebooks.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("notebooks")


@pytest.fixture
def execute(tool, tmp_path):
    """Give a function that runs a notebook in an empty folder: code of a cell -> its texts."""

    def run(name):
        notebook = tool.execute(ROOT / f"docs/notebooks/{name}.ipynb", tmp_path)
        return {cell["source"]: text_of(cell) for cell in notebook["cells"]}

    return run


def text_of(cell):
    """Return all that a code cell printed and returned; a table as its HTML."""
    data = [output.get("data", {}) for output in cell.get("outputs", ())]
    shown = [part.get("text/html", part.get("text/plain", "")) for part in data]
    return "\n".join([*shown, *(output.get("text", "") for output in cell.get("outputs", ()))])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_outputs_are_those_of_the_code(path, tool):
    notebook = json.loads(path.read_text("utf8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert notebook["metadata"]["plugsft"]["outputs_of"] == tool.code_digest(notebook), (
        "the code has changed: run python tools/notebooks.py"
    )
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    assert not re.search(r"/(work|home|root|tmp|usr|opt)/", path.read_text("utf8"))
    assert not any(cell["metadata"] for cell in notebook["cells"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere_and_pages_lead_here(path):
    cells = json.loads(path.read_text("utf8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links and all((path.parent / link).exists() for link in links), links
    for page in ("README.md", "python.md"):
        assert f"(notebooks/{path.name})" in (ROOT / "docs" / page).read_text("utf8")


@pytest.mark.slow
def test_own_chats_with_lora(execute, tmp_path):
    texts = execute("own_chats")
    losses = [line["loss"] for line in read_metrics(tmp_path / "runs/bakery")]
    assert losses[-1] < 0.3 < 3 < losses[0]
    talk = next(text for code, text in texts.items() if code.startswith("talk ="))
    assert "I am a tiny language model" in talk
    for answer in ("We open at seven every morning, except on Mondays.", "tell us two days before"):
        assert answer in talk
    low = [line["loss"] for line in read_metrics(tmp_path / "runs/rate-0.001")]
    assert low[0] == losses[0] and low[-1] > 3 * losses[-1]


@only_full
def test_preferences(execute, tmp_path):
    texts = execute("preferences")
    lines = (tmp_path / "runs/brief/metrics.jsonl").read_text().splitlines()
    evaluations = [line for line in map(json.loads, lines) if "eval_loss" in line]
    assert evaluations[-1]["eval_accuracy"] == 1
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]
    talk = next(text for code, text in texts.items() if code.startswith("talk ="))
    # The model was brief to a question that no pair had.
    assert talk.count("No, but there is water outside.") == 2
    assert talk.count("The oven is older than the bridge.") == 1


@only_full
def test_a_plugin_of_ones_own(execute, tmp_path):
    texts = execute("own_plugin")
    plain, usual, focal = (
        read_metrics(tmp_path / f"runs/{name}") for name in ("plain", "usual", "focal")
    )
    assert [line["loss"] for line in usual] == pytest.approx(
        [line["loss"] for line in plain], rel=1e-4
    )
    assert focal[-1]["sure"] > 0.8 > 0.1 > focal[0]["sure"]
    assert any("gamma = -1.0 trains most on known tokens" in text for text in texts.values())
    talk = next(text for code, text in texts.items() if "talk =" in code)
    assert talk.count("I am a tiny language model, trained from scratch by the plugsft") == 2
