"""The imports of every process that tests fork; see forks.py."""

import atexit
import gc
import importlib
import os
from contextlib import suppress

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else its import looks for a GPU, and says so

with suppress(ImportError):
    importlib.import_module("deepspeed")

import forks  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import plugsft.commands.runs.start
import plugsft.lab.bench.run
import plugsft.lab.tune.run
import plugsft.loop  # noqa: F401

# A table of some thousand patterns that each first model of a process compiles.
get_checkpoint_conversion_mapping("llama")
# A fork's garbage collections skip what it has inherited: else each copies all pages of it.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)
