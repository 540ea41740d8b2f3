"""Real launches by accelerate with our files, and what their runs learn."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    FULL,
    ROOT,
    chats,
    must_succeed,
    read_metrics,
    run_launch,
    tiny_tables,
    write_recipe,
)
from saved_runs import checkpoint, read
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForCausalLM

from plugsft import digest
from plugsft.model.defaults import ModelDefaults
from plugsft.tokens.store import Tokens

NUMBERS = ("loss", "grad_norm", "eval_loss")
TRAIN = {"batch_size": 8, "micro_batch": 2, "steps": 7, "learning_rate": 1e-3, "max_grad_norm": 0.5}
# What `accelerate launch` sets for its ranks.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}
ZERO3 = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
}
# Of TrainedBase: all that a step learns from.
EXAMPLES = 64 if FULL else 32


def launch(*words, env=None):
    """Start `accelerate launch` with these words."""
    return subprocess.Popen(
        [Path(sys.executable).with_name("accelerate"), "launch", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
        cwd=ROOT,
    )


def finish(process, timeout=240):
    """Wait for a launch; return its exit code and output."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def config(name, ranks=2):
    """Return the words that name one of our files for accelerate."""
    return ("--config_file", ROOT / f"recipes/accelerate/{name}.yaml", "--num_processes", ranks)


def curve(run):
    """Return losses, gradient norms and evaluation losses of a run."""
    return [line[name] for name in NUMBERS for line in read_metrics(run) if name in line]


def learns_what_one_does_without(plugin, name, recipe, folder):
    """Train on two ranks, and on one process without a plugin; return the ranks' folder, output."""
    alone, run = folder / "alone", folder / name
    must_succeed(recipe, f"output={alone}", "--without", plugin)
    code, out, err = run_launch(*config(name), "-m", "plugsft", recipe, f"output={run}")
    assert code == 0, err
    assert curve(run) == pytest.approx(curve(alone), rel=1e-5)
    return run, out


def train_on(
    folder, rows, model, steps, rate, kind=None, micro=EXAMPLES, seed=0, plugins=None, **keys
):
    """Train with constant rate, alone or launched; return the folder of the run."""
    tables = tiny_tables(folder, rows)
    tables["model"] = model | keys
    tables["train"] = {"batch_size": EXAMPLES, "micro_batch": micro, "steps": steps, "seed": seed}
    tables["train"] |= {"learning_rate": rate, "schedule": "constant", "max_grad_norm": 0.0}
    tables["checkpoint"] = {"every": 0}
    tables["plugins"] = plugins or {}
    recipe = write_recipe(folder / "recipe.toml", tables)
    if kind is None:
        must_succeed(recipe, timeout=3000)
    else:
        code, _, err = run_launch(*config(kind), "-m", "plugsft", recipe, timeout=3000)
        assert code == 0, err
    return folder / "run"


def flat(weights, names):
    return torch.cat([weights[name].flatten() for name in names]).double()


class TrainedBase:
    """A model that has learned a little, so that its loss has somewhere to fall."""

    def __init__(self, folder, seed):
        self.folder, self.seed = folder, seed
        self.rows = chats(EXAMPLES, seed)
        model = tiny_tables(folder)["model"]
        base = train_on(folder / "base", self.rows, model, 30, 3e-3, seed=seed)
        # As most models on the hub are: float32 begins with the same weights as bfloat16.
        self.path = base / "model"
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.bfloat16)
        model.save_pretrained(self.path)
        (self.path / "manifest.json").unlink()  # of what the run has written
        self.weights = {name: one.detach().float() for name, one in model.named_parameters()}
        tokens = Tokens(next((base / "tokens").glob("*/facts.json")).parent)
        batch = ModelDefaults().collate(tokens, np.arange(len(tokens)), 0)
        self.batch, self.count = batch, int((batch["labels"][:, 1:] >= 0).sum())
        self.loss = self.loss_of(self.weights)
        self.exact = {}

    @torch.no_grad()
    def loss_of(self, weights):
        """Return the loss of weights, in float32, over all rows."""
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        model.load_state_dict(weights, strict=False)
        return float(ModelDefaults().token_nll(model, self.batch, True)) / self.count

    def learn(self, steps, kind=None, micro=EXAMPLES, dtype="bfloat16", **keys):
        """Train from here on at 1e-5; return the fall of the loss and how the weights moved."""
        words = json.dumps(keys.get("plugins", len(keys)))
        folder = self.folder / f"{steps}-{dtype}-{kind}-{micro}-{digest({'keys': words})}"
        model = {"path": str(self.path), "dtype": dtype}
        run = train_on(folder, self.rows, model, steps, 1e-5, kind, micro, self.seed, **keys)
        after, names = read(checkpoint(run, steps)), sorted(self.weights)
        moved = flat(after, names) - flat(self.weights, names)
        return SimpleNamespace(
            fall=self.loss - self.loss_of(after),
            moved=moved,
            still=float((moved == 0).double().mean()),
        )

    def compared(self, steps, kind=None, micro=EXAMPLES, **keys):
        """Compare with float32 in one process and one micro-batch."""
        if steps not in self.exact:
            self.exact[steps] = self.learn(steps, dtype="float32")
        exact, found = self.exact[steps], self.learn(steps, kind, micro, **keys)
        cosine = float(cosine_similarity(exact.moved, found.moved, dim=0))
        print(
            f"\nseed {self.seed} {kind or 'one process':<12} {micro:>2} a time: falls by "
            f"{found.fall:.5f} (float32 {exact.fall:.5f}), cosine {cosine:.4f}, "
            f"{found.still:.1%} of the weights stay (float32 {exact.still:.1%})"
        )
        return SimpleNamespace(
            share=found.fall / exact.fall, cosine=cosine, still=found.still - exact.still
        )
