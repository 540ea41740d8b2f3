"""Settings that a run makes before CUDA starts, and DDP's."""

import json

import pytest
from conftest import run_plugsft, run_ranks
from plugin_packages import activate, install

EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
# A GPU is made up until plugins check the recipe; then the run ends.
SHOWS = """
    import json, os

    import torch

    torch.cuda.is_available = lambda: True

    @plugin()
    class Shows:
        '''Stop with what torch finds when CUDA starts.'''

        @hookimpl
        def check(self, recipe):
            # What torch's allocators read; older releases do not show it.
            read = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: None)()
            variables = {name: text for name, text in os.environ.items() if "ALLOC_CONF" in name}
            cudnn = torch.backends.cuda.cudnn_sdp_enabled()
            raise RecipeError("found " + json.dumps([variables, read, cudnn]))
"""
# An optimizer that looks at the gradients of each step.
LOOKS = """
    from torch.optim import AdamW

    class Looking(AdamW):
        tensors, storages = 0, 0

        def step(self, *arguments):
            gradients = [one.grad for group in self.param_groups for one in group["params"]]
            Looking.tensors = len(gradients)
            Looking.storages = len({one.untyped_storage().data_ptr() for one in gradients})
            return super().step(*arguments)

    @plugin()
    class Looks:
        '''Say how many storages hold the gradients.'''

        @hookimpl
        def optimizer(self, model, train):
            return Looking(model.parameters(), lr=train.learning_rate)

        @hookimpl
        def summary(self):
            return f"{Looking.tensors} gradients in {Looking.storages} storages"
"""


@pytest.mark.parametrize(
    ("overrides", "environment", "variables", "cudnn"),
    [
        ([], {}, EXPANDABLE, False),
        (["device=cpu"], {}, {}, True),
        ([], {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, None, False),
        ([], {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None, False),
        ([], {"PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:64"}, None, False),
        ([], {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "0"}, EXPANDABLE, True),
    ],
    ids=["gpu", "cpu", "allocator", "old-name", "hip", "cudnn"],
)
def test_a_gpu_is_prepared_before_cuda_starts_unless_the_user_did(
    tiny, tmp_path, monkeypatch, overrides, environment, variables, cudnn
):
    activate(install(tmp_path / "site", shows=SHOWS), monkeypatch)
    result = run_plugsft(tiny(plugins={"shows": {}}), *overrides, env=environment)
    assert result.returncode == 2, result.stderr
    found, read, enabled = json.loads(result.stderr.partition("found ")[2])
    variables = environment if variables is None else variables
    assert found == variables
    assert read in ("".join(variables.values()), None)
    assert enabled is cudnn


def test_gradients_of_ddp_are_views_of_its_buckets(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", looks=LOOKS), monkeypatch)
    recipe = tiny(train={"batch_size": 8, "micro_batch": 2, "steps": 3}, plugins={"looks": {}})
    result = run_ranks(2, recipe, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    plugins = json.loads((tmp_path / "run/run.json").read_text())["plugins"]
    summary = next(plugin["summary"] for plugin in plugins if plugin["name"] == "looks")
    tensors, storages = (int(word) for word in summary.split() if word.isdigit())
    assert storages < tensors / 4, summary
