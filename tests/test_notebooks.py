"""Notebooks run in a real kernel: those of docs/, and one whose stop button is pressed."""

import importlib
import json
import re
import sys
import time

import pytest
from conftest import ROOT, only_full, read_metrics, tiny_tables

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
TRAIN = """
import plugsft.api
from plugsft import hookimpl, plugin, state

@plugin()
class Slow:
    after: int
    seen: list = state([])

    @hookimpl
    def stepped(self, run):
        self.seen.append(run.step)
        if run.step > self.after:
            import time
            time.sleep(0.5)

slow = Slow(after=2)
plugsft.api.train(TABLES, plugins=[slow])
"""
RESUME = """
run = plugsft.api.train(TABLES, resume=True, train={"epochs": 4})
print(slow.seen[:3], len(run.metrics))
run
"""


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


@only_full
@pytest.mark.slow
def test_the_model_of_own_chats_answers_them(execute, tmp_path):
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
def test_preferences_make_a_model_brief(execute, tmp_path):
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
def test_a_plugin_of_the_notebook_changes_the_loss(execute, tmp_path):
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


class Kernel:
    """A kernel of this Python, as notebooks start it."""

    def __init__(self, folder):
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.manager import KernelManager

        self.manager = KernelManager()
        words = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self.manager._kernel_spec = KernelSpec(argv=words, language="python")
        self.manager.start_kernel(cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=240)

    def messages(self, code):
        """Run a cell; yield its messages until it ends."""
        asked = self.client.execute(code)
        while True:
            message = self.client.get_iopub_msg(timeout=240)
            if message["parent_header"].get("msg_id") == asked:
                yield message["msg_type"], message["content"]
                if message["content"].get("execution_state") == "idle":
                    return

    def end(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.end()


@only_full
def test_a_notebook_trains_and_is_interrupted_in_order(kernel, tmp_path):
    tables = tiny_tables(tmp_path)
    tables["train"]["epochs"] = 4
    setup = f"TABLES = {tables!r}\n"
    text, error, interrupted = "", {}, 0.0
    for kind, content in kernel.messages(setup + TRAIN):
        if kind == "stream" and content["name"] == "stdout":
            text += content["text"]
            # The line of a step is here while the run goes on.
            if "step 3/12" in text and not interrupted:
                interrupted = time.monotonic()
                kernel.manager.interrupt_kernel()
        if kind == "error":
            error = content
    assert interrupted and error["ename"] == "Stopped", text
    assert "stopped by SIGINT after step" in error["evalue"] and "step 12/12" not in text
    shown, text = {}, ""
    for kind, content in kernel.messages(RESUME):
        assert kind != "error", content
        text += content["text"] if kind == "stream" else ""
        shown |= content["data"] if kind == "execute_result" else {}
    assert "[1, 2, 3] 12" in text and "step 12/12" in text
    assert "completed" in shown["text/plain"] and "<table" in shown["text/html"]
