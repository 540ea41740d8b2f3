"""How a run reports a failure: in run.json, with plugin, rows and traceback."""

import json
import subprocess
import sys
from textwrap import dedent

import pytest
from conftest import ROOT, only_full, run_plugsft
from plugin_packages import activate, failing, install
from transformers import LlamaConfig, LlamaForCausalLM

FAILS = """
    @plugin()
    class Fails:
        hook: str
        call: int = 1
        opens: bool = False
        calls: int = state(0)

        def fail(self, hook):
            self.calls += hook == self.hook
            if hook == self.hook and self.calls == self.call:
                if self.opens:
                    open("/nowhere/words.txt")
                raise ValueError("a mistake of the plugin")

        @hookimpl(wrapper=True)
        def collate(self):
            batch = yield
            self.fail("collate")
            return batch

        @hookimpl
        def summary(self):
            self.fail("summary")
            return f"asked {self.calls} times"
"""
FAILS += failing("check", "render", "optimize_model", "logged", "ready", "finished")
# The hook that fails, at which of its calls, whether over a file, and whether run.json is there.
CASES = [
    ("check", 1, True, False),
    ("render", 1, True, False),
    ("collate", 4, False, True),
    ("logged", 4, True, True),
    ("finished", 1, False, True),
    ("summary", 2, False, True),
    *(
        pytest.param(*case, marks=only_full)
        for case in [
            ("optimize_model", 1, True, False),
            ("ready", 1, False, False),
            ("summary", 1, True, False),
            ("collate", 1, True, True),
            ("logged", 1, False, True),
            ("logged", 3, False, True),
        ]
    ),
]


@pytest.mark.parametrize(("hook", "call", "opens", "recorded"), CASES)
def test_a_plugin_that_fails_is_named_and_its_run_has_failed(
    tiny, tmp_path, monkeypatch, hook, call, opens, recorded
):
    activate(install(tmp_path, fails=FAILS), monkeypatch)
    options = {"hook": hook, "call": call, "opens": opens}
    held_out = {"every": 3, "split": "train[:8]"}
    recipe = tiny(train={"steps": 3}, eval=held_out, plugins={"fails": options})
    done = run_plugsft(recipe)
    says = "a mistake of the plugin"
    if opens:
        says = "[Errno 2] No such file or directory: '/nowhere/words.txt'"
    assert done.returncode == 1, done.stderr
    assert "Traceback" in done.stderr and "in fail" in done.stderr and says in done.stderr
    assert f"raised by plugin 'fails', in its hook '{hook}'" in done.stderr
    run = tmp_path / "run"
    assert (run / "run.json").exists() == recorded
    if recorded:
        facts = json.loads((run / "run.json").read_text())
        assert facts["status"] == "failed" and f"Error: {says}" in facts["reason"]
        assert f"plugin 'fails', in its hook '{hook}'" in facts["reason"]
        assert says.partition("'")[0] in (run / "report.html").read_text()
    if hook == "collate":
        [said] = [line for line in done.stderr.splitlines() if line.startswith("as rank ")]
        place = f"from {tmp_path / 'data.jsonl'} rows "
        assert said.startswith(
            f"as rank 0 made the batches of step {2 if call == 4 else 1}, {place}"
        )
        assert len(said.partition(place)[2].split(", ")) == 4


LOADS = """
    import resource, sys
    from pathlib import Path
    import torch
    from plugsft.base.errors import PlugsftError
    from plugsft.model.load import ModelLoad
    folder, spare = sys.argv[1], int(sys.argv[2])
    ModelLoad(folder, {"dtype": torch.float32}).load_model()  # all is imported
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, -1))
    try:
        ModelLoad(folder, {"dtype": torch.float64}).load_model()
    except PlugsftError as error:
        print(error.exit_code, error)
"""


@pytest.mark.parametrize(
    "spare", [24 << 20, *(pytest.param(n << 20, marks=only_full) for n in (1, 40))]
)
def test_memory_that_runs_out_as_a_model_is_loaded_is_called_so(tmp_path, spare):
    """Wherever it happens: as a file is mapped, or as a tensor is made."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    command = [sys.executable, "-c", dedent(LOADS), str(tmp_path), str(spare)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    said = f"1 model.path: out of memory while loading '{tmp_path}'"
    assert done.stdout.strip() == said, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["check", "nowhere.toml"], 2, "RecipeError: nowhere.toml: cannot be read"),
        (["train", "recipes/quickstart.toml", "train.step=3"], 2, "unknown key"),
        (["qqq"], 2, "is neither a command nor a recipe"),
        (["chat", "recipes"], 2, "PlugsftError: recipes: holds no model"),
    ],
)
def test_every_error_has_a_traceback_where_it_is_asked_for(words, code, says):
    plain = run_plugsft(*words)
    assert plain.returncode == code and "Traceback" not in plain.stderr
    done = run_plugsft(*words, env={"PLUGSFT_DEBUG": "1"})
    assert done.returncode == code and "Traceback" in done.stderr and says in done.stderr
    assert done.stderr.endswith(plain.stderr)
