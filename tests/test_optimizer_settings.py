"""Settings of the recipe that a plugin's optimizer does not use are refused."""

import pytest
import torch
from conftest import ROOT, only_full, run_launch, run_plugsft, run_ranks
from plugin_packages import activate, install

from plugsft import RecipeError
from plugsft.ranks.optimizer_checks import ensure_uses_settings
from plugsft.recipe.tables import Train

LION = """
    @plugin()
    class Lion:
        "Uses the learning rate and beta1."
        inside: bool = False

        @hookimpl
        def optimizer(self, model, train):
            import torch

            class Inner(torch.optim.SGD):
                pass

            class Lion(Inner):
                pass

            weights = [weight for weight in model.parameters() if weight.requires_grad]
            lion, inner = Lion(weights, lr=train.learning_rate), Inner(weights)
            holder = inner if self.inside else lion
            holder.param_groups[0]["betas"] = (train.beta1, 0.99)
            lion.inner = [inner]
            return lion
"""
NOISE = """
    @plugin()
    class Noise:
        @hookimpl(wrapper=True)
        def optimizer(self):
            return (yield)
"""


@pytest.fixture
def recipe(tiny, tmp_path, monkeypatch):
    """Return `recipe(**options)`: a recipe with the optimizer of plugin 'lion'."""
    activate(install(tmp_path / "site", lion=LION, noise=NOISE), monkeypatch)
    return lambda **options: tiny(plugins={"lion": options}, train={"steps": 1})


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_setting_that_the_optimizer_ignores_is_refused(recipe, ranks):
    result = run_ranks(ranks, recipe(), "train.beta2=0.95", "train.weight_decay=0.1")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    for line in (
        "remove train.beta2 = 0.95: the optimizer of plugin 'lion' does not use it (no parameter "
        "group of Lion has this value as betas[1])",
        "remove train.weight_decay = 0.1: the optimizer of plugin 'lion' does not use it",
    ):
        assert line in result.stderr


@only_full
@pytest.mark.parametrize("launcher", ["fsdp2", "zero3"])
def test_sharded_weights_change_nothing(recipe, launcher):
    config = ROOT / f"recipes/accelerate/{launcher}.yaml"
    start = ("--config_file", config, "--num_processes", 2, "-m", "plugsft", recipe(inside=False))
    code, out, err = run_launch(*start, "train.beta2=0.95")
    assert code == 2 and "remove train.beta2 = 0.95: the optimizer of plugin 'lion'" in err, out
    code, out, err = run_launch(*start, "plugins.lion.enabled=false", "train.beta2=0.95")
    assert code == 0, out + err


@pytest.mark.parametrize("inside", [False, True])
def test_settings_that_the_optimizer_uses_are_not_refused(recipe, inside):
    """In its groups, or in those of an optimizer inside it; defaults are never refused."""
    result = run_plugsft(recipe(inside=inside), "train.beta1=0.8", "plugins.noise={}")
    assert result.returncode == 0, result.stderr


WEIGHTS = [torch.nn.Parameter(torch.zeros(2, 2))]
HOLDS = {
    "beta1": [torch.optim.AdamW(WEIGHTS, betas=(0.5, 0.6))],
    "beta2": [torch.optim.AdamW(WEIGHTS, betas=(torch.tensor(0.6), torch.tensor(0.5)))],
    "eps": [
        torch.optim.AdamW(WEIGHTS, eps=0.5),
        torch.optim.Adafactor(WEIGHTS, eps=(0.5, 1e-3)),
        torch.optim.Adafactor(WEIGHTS, eps=(None, 0.5)),
    ],
    "weight_decay": [
        torch.optim.SGD(WEIGHTS, weight_decay=0.5),
        torch.optim.SGD([{"params": WEIGHTS, "weight_decay": 0.5}], weight_decay=0.1),
    ],
}
CASES = [(key, optimizer) for key, optimizers in HOLDS.items() for optimizer in optimizers]


@pytest.mark.parametrize(("key", "optimizer"), CASES)
def test_settings_are_found_in_parameter_groups(key, optimizer):
    train = {"batch_size": 1, "learning_rate": 1e-3}
    ensure_uses_settings(optimizer, Train(**train, **{key: 0.5}), ["lion"])
    with pytest.raises(RecipeError, match=f"^remove train.{key} = 0.7: the optimizer of plugin"):
        ensure_uses_settings(optimizer, Train(**train, **{key: 0.7}), ["lion"])
    ensure_uses_settings(optimizer, Train(**train), ["lion"])
