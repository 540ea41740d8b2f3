"""The imports of every process that tests fork, and what it would do first; see forks.py."""

import atexit
import gc
import importlib
import json
import os
import tempfile
from contextlib import redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # without this, its import looks for a GPU

with suppress(ImportError):
    importlib.import_module("deepspeed")

import datasets  # noqa: F401
import forks  # noqa: F401
import torch
import typer.main
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import plugsft.api
import plugsft.lab.bench
import plugsft.lab.tune
import plugsft.loop
import plugsft.plugins.lora.adapters  # peft: two thirds of a tiny run with adapters
import plugsft.start.before_run
from plugsft.api.isolation import isolated

MESSAGES = [{"role": role, "content": "hello"} for role in ("user", "assistant")]


def warm_up(folder: Path) -> None:
    """Compile schemas, patterns and a template, and fill caches; leave all else as it was.

    Nothing is trained: after a backward pass, torch refuses one in a fork.
    """
    get_checkpoint_conversion_mapping("llama")  # it compiles a thousand patterns
    typer.main.get_command = cache(typer.main.get_command)
    typer.main.get_command(plugsft.cli.app)
    (folder / "rows.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    plugsft.api.prepare(
        {
            "output": str(folder / "run"),
            "model": {"scratch": {"hidden": 8, "layers": 1, "heads": 1, "vocab": 300}},
            "data": {"source": str(folder / "rows.jsonl"), "max_length": 64},
            "train": {"batch_size": 1, "learning_rate": 0.1},
        }
    )
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 9}
    config = LlamaConfig(**sizes, intermediate_size=8)
    ids = torch.ones(1, 2, dtype=torch.int64)
    with isolated(), torch.no_grad():
        with torch.device("meta"):
            LlamaForCausalLM(config)
        LlamaForCausalLM(config).save_pretrained(folder / "model")
        AutoModelForCausalLM.from_pretrained(folder / "model")(input_ids=ids, labels=ids)


# A fork lacks these threads, and would wait for them: on Intel's, MKL starts some for a cosine.
threads = torch.get_num_threads()
torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
    warm_up(Path(folder))
torch.set_num_threads(threads)
# A fork's garbage collections skip what it has inherited: else each copies all pages of it.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)
