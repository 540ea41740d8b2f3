"""A real notebook kernel trains, shows steps as they happen, and is interrupted in order."""

import sys
import time

import pytest
from conftest import only_full, tiny_tables
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

TRAIN = """
import plugsft
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
plugsft.train(TABLES, plugins=[slow])
"""
RESUME = """
run = plugsft.train(TABLES, resume=True, train={"epochs": 4})
print(slow.seen[:3], len(run.metrics))
run
"""


class Kernel:
    """A kernel of this Python, as notebooks start it."""

    def __init__(self, folder):
        self.manager = KernelManager()
        words = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self.manager._kernel_spec = KernelSpec(argv=words, language="python")
        self.manager.start_kernel(cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def messages(self, code):
        """Run a cell; yield its messages until it ends."""
        asked = self.client.execute(code)
        while True:
            message = self.client.get_iopub_msg(timeout=120)
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
