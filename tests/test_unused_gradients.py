"""Gradients of weights that the optimizer leaves out: refused by name, and never summed up."""

import shutil

import pytest
from conftest import read_metrics, run_plugsft
from plugin_packages import activate, install

PARTIAL = """
    from torch.optim import AdamW
    from torch.nn import Parameter
    import torch

    @plugin()
    class Partial:
        '''Train matrices, and vectors only if asked to.'''

        vectors: bool = True
        freeze: bool = False
        foreign: bool = False

        @hookimpl(wrapper=True)
        def optimize_model(self):
            model = yield
            for one in model.parameters():
                if one.dim() == 1 and self.freeze:
                    one.requires_grad_(False)
            return model

        @hookimpl
        def optimizer(self, model, train):
            taken = [one for one in model.parameters() if one.requires_grad]
            taken = [one for one in taken if self.vectors or one.dim() > 1]
            extra = [Parameter(torch.zeros(3, 7))] if self.foreign else []
            return AdamW([*taken, *extra], lr=train.learning_rate)
"""
THAWS = """
    @plugin()
    class Thaws:
        '''Compute gradients of vectors that no optimizer knows.'''

        @hookimpl(wrapper=True)
        def optimize_model(self):
            model = yield
            self.vectors = [one for one in model.parameters() if one.dim() == 1]
            for one in self.vectors:
                one.requires_grad_(False)
            return model

        @hookimpl(wrapper=True)
        def step(self):
            for one in self.vectors:
                one.requires_grad_(True)
            return (yield)

        @hookimpl
        def add_metrics(self):
            for one in self.vectors:
                one.requires_grad_(False)  # its gradient stays
            return {}

        vectors: list = state([])
"""


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    activate(install(tmp_path / "site", partial=PARTIAL, thaws=THAWS), monkeypatch)


@pytest.mark.parametrize(
    "options, says",
    [
        (
            {"vectors": False},
            "leaves out 5 trainable weights (model.layers.0.input_layernorm.weight first); give",
        ),
        (
            {"foreign": True},
            "gives it 1 tensors that are not trainable weights of the model (the",
        ),
    ],
)
def test_an_optimizer_of_other_weights_is_refused(tiny, plugins, options, says):
    result = run_plugsft(tiny(plugins={"partial": options}))
    assert result.returncode == 2 and says in result.stderr and "Traceback" not in result.stderr
    assert "step 1" not in result.stdout


@pytest.mark.parametrize(
    "used", [{"partial": {"vectors": False, "freeze": True}}, {"thaws": {}}], ids=lambda one: [*one]
)
def test_norms_do_not_depend_on_the_steps_before(tiny, plugins, tmp_path, used):
    """A resumed run has no gradients of earlier steps: it finds the norms of one that has."""
    recipe = tiny(train={"steps": 5, "max_grad_norm": 0.1}, checkpoint={"every": 3}, plugins=used)
    whole = run_plugsft(recipe)
    assert whole.returncode == 0, whole.stderr
    run, parts = tmp_path / "run", tmp_path / "parts"
    shutil.copytree(run, parts)
    shutil.rmtree(parts / "checkpoints/step-000005")
    result = run_plugsft(recipe, f"output={parts}", "--resume")
    assert result.returncode == 0, result.stderr
    norms = [[line["grad_norm"] for line in read_metrics(one)] for one in (run, parts)]
    assert norms[0] == norms[1] and len(norms[0]) == 5
