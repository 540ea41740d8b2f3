"""One launch a strategy with many plugins at once learns what one process learns without them.

With --full, the plugins' own tests launch each alone.
"""

import pytest
from conftest import must_succeed, only_full, read_record, run_launch
from first_step import pairs
from launching import config, curve
from safetensors.torch import load_file
from torch.testing import assert_close

LEARNING = {
    "dpo": {},
    "lora": {"r": 4},
    "ema": {"decay": 0.3},
    "samples": {"prompts": ["hello"], "every": 2, "max_tokens": 9, "temperature": 1.0},
}
"""Their results are compared."""
LAYOUT = ("bfd_packing.capacity=256", "fused_loss.chunk=7", "gradient_checkpointing.every=1")
LAYOUT += ("dpo_reference={}", "dpo.share_prompt=true", "async_collate={}")
"""None of these changes what is learned."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("cpu2", marks=only_full), "fsdp2", "zero3"])
def test_many_plugins_on_sharded_ranks_learn_what_one_process_does(tiny, tmp_path, kind):
    recipe = tiny(
        rows=pairs(21),
        train={"steps": 6, "micro_batch": 1, "learning_rate": 1e-2},
        eval={"every": 3, "split": "train[:5]"},
        plugins=LEARNING,
    )
    alone, run = tmp_path / "alone", tmp_path / kind
    must_succeed(recipe, f"output={alone}")
    words = [f"output={run}", *(f"plugins.{one}" for one in LAYOUT)]
    code, _, err = run_launch(*config(kind), "-m", "plugsft", recipe, *words)
    assert code == 0, err
    assert curve(run) == pytest.approx(curve(alone), rel=1e-5, abs=1e-6)
    averages, expected = (
        load_file(one / "model/adapter_model.safetensors") for one in (run, alone)
    )
    assert_close(averages, expected, rtol=0, atol=1e-4)
    answers = (run / "samples.jsonl").read_text()
    assert answers == (alone / "samples.jsonl").read_text() and answers.count("\n") == 4
    plugins = read_record(run)["plugins"]
    assert len(plugins) == 9
