"""Out of memory, for real: what was too much, and what would lower it."""

import pytest
from conftest import chats, run_plugsft, write_jsonl
from plugin_packages import activate, install

LIMIT = """
    import resource

    import psutil

    @plugin()
    class Limit:
        '''Leave a process little more memory than it has when step 1 begins.'''

        mib: int = 64
        rank: str = "0"
        set: bool = state(False)

        @hookimpl(wrapper=True)
        def load_batches(self):
            feed = yield
            import os
            if os.environ.get("RANK", "0") == self.rank and not self.set:
                self.set = True
                room = psutil.Process().memory_info().vms + (self.mib << 20)
                resource.setrlimit(resource.RLIMIT_AS, (room, room))
            return feed
"""
WIDE = {"hidden": 64, "layers": 1, "heads": 2, "vocab": 340, "context": 4096}

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c " * 1500}]
LONG = [{"messages": TURNS}] * 8


@pytest.fixture
def limited(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", limit=LIMIT), monkeypatch)

    def make(rows=LONG, **plugins):
        tables = {
            "rows": chats(4) + rows,
            "model": {"scratch": WIDE},
            "train": {"batch_size": 12, "micro_batch": 12, "steps": 2},
            "plugins": {"limit": {}, **plugins},
        }
        return tiny(**tables)

    return make


def test_the_micro_batch_its_tokens_and_the_cures_are_named(limited):
    result = run_plugsft(limited(), "data.max_length=4096")
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    assert "step 1, rank 0: out of memory in micro-batch 1 of 1: 12 examples, " in result.stderr
    for cure in ("train.micro_batch", "data.max_length (now 4,096)", "[plugins.fused_loss]"):
        assert cure in result.stderr


def test_an_out_of_memory_error_names_the_evaluation_or_the_step(limited, tmp_path):
    held_out = write_jsonl(tmp_path / "long.jsonl", LONG)
    words = (f"eval.source={held_out}", "eval.every=1", "data.max_length=4096")
    result = run_plugsft(limited(rows=[]), *words)
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    assert "evaluation, step 1, rank 0: out of memory in micro-batch 1 of 1: 8 ex" in result.stderr
