"""The imports of every process that tests fork; see forks.py."""

import atexit
import gc
import importlib
import os
from contextlib import suppress

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # without this, its import looks for a GPU

with suppress(ImportError):
    importlib.import_module("deepspeed")

import datasets  # noqa: F401
import forks  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import plugsft.commands.runs.start
import plugsft.lab.bench.run
import plugsft.lab.tune.run
import plugsft.loop
import plugsft.plugins.lora.adapters  # noqa: F401  # peft: two thirds of a tiny run with adapters

# This compiles a thousand patterns, which the first model of a process needs.
get_checkpoint_conversion_mapping("llama")
# A fork's garbage collections skip what it has inherited: else each copies all pages of it.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)
