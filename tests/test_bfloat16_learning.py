"""bfloat16 learns as much as float32, in the same direction, under every launcher."""

import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import FULL, chats, only_full, run_launch, run_plugsft, tiny_tables, write_recipe
from launching import config
from saved_runs import read
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForCausalLM

from plugsft import digest
from plugsft.model.defaults import ModelDefaults
from plugsft.tokens.store import Tokens

KINDS = [None, "cpu2", "fsdp2", "zero3"]
EXAMPLES = 64 if FULL else 32
TRAIN = {"batch_size": EXAMPLES, "schedule": "constant", "max_grad_norm": 0.0}


def trained(
    folder, rows, model, steps, rate, kind=None, micro=EXAMPLES, seed=0, plugins=None, **keys
):
    """Train; return the folder of the run."""
    tables = tiny_tables(folder, rows)
    tables["model"] = model | keys
    tables["train"] = TRAIN | {"steps": steps, "learning_rate": rate}
    tables["train"] |= {"micro_batch": micro, "seed": seed}
    tables["checkpoint"] = {"every": 0}
    tables["plugins"] = plugins or {}
    recipe = write_recipe(folder / "recipe.toml", tables)
    if kind is None:
        done = run_plugsft(recipe, timeout=3000)
        assert done.returncode == 0, done.stderr
    else:
        code, _, err = run_launch(*config(kind), "-m", "plugsft", recipe, timeout=3000)
        assert code == 0, err
    return folder / "run"


def weights_of(run):
    """Return the float32 weights of the last checkpoint, whatever ranks and sharding wrote it."""
    [folder] = (run / "checkpoints").glob("step-*")
    return read(folder)


def flat(weights, names):
    return torch.cat([weights[name].flatten() for name in names]).double()


class Base:
    """A model that has learned a little, so that its loss has somewhere to fall."""

    def __init__(self, folder, seed):
        self.folder, self.seed = folder, seed
        self.rows = chats(EXAMPLES, seed)
        model = tiny_tables(folder)["model"]
        base = trained(folder / "base", self.rows, model, 30, 3e-3, seed=seed)
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
        run = trained(folder, self.rows, model, steps, 1e-5, kind, micro, self.seed, **keys)
        after, names = weights_of(run), sorted(self.weights)
        moved = flat(after, names) - flat(self.weights, names)
        return SimpleNamespace(
            fall=self.loss - self.loss_of(after),
            moved=moved,
            still=float((moved == 0).double().mean()),
        )

    def judged(self, steps, kind=None, micro=EXAMPLES, **keys):
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


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return functools.cache(lambda seed: Base(tmp_path_factory.mktemp(f"seed-{seed}"), seed))


def ensure_learned(found):
    assert found.share == pytest.approx(1, abs=0.05), "the loss falls as it does in float32"
    assert found.cosine >= 0.98, "the weights move where float32 moves them"
    assert found.still <= 0.05, "no weights stay that move in float32"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [None, "fsdp2", *(pytest.param(kind, marks=only_full) for kind in ("cpu2", "zero3"))]
)
def test_bfloat16_learns_what_float32_learns(base, kind):
    """Gradients of several micro-batches, summed on each rank and over the ranks."""
    ensure_learned(base(0).judged(20, kind, EXAMPLES // 4))


@pytest.mark.slow
def test_weights_of_bfloat16_hardly_move_and_say_so(base):
    """What the test above finds where weights and optimizer states are stored in bfloat16."""
    found = base(0).judged(20, weights="bfloat16")
    assert found.still > 0.5 and abs(found.share - 1) > 0.05 and found.cosine < 0.98


# In micro-batches of all examples; and of one, where each step adds up 64 gradients over all ranks.
WHOLE = [(kind, 1, seed, 200) for kind in KINDS for seed in range(3)]
PARTS = [(kind, 64, 0, 50) for kind in KINDS]


@only_full
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind, parts, seed, steps", WHOLE + PARTS)
def test_bfloat16_learns_in_many_steps_what_float32_learns(base, kind, parts, seed, steps):
    ensure_learned(base(seed).judged(steps, kind, EXAMPLES // parts))
