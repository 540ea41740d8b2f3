"""bfloat16 learns as much as float32, in the same direction, under every launcher."""

import functools

import pytest
from conftest import only_full
from launching import EXAMPLES, TrainedBase

KINDS = [None, "cpu2", "fsdp2", "zero3"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return functools.cache(lambda seed: TrainedBase(tmp_path_factory.mktemp(f"seed-{seed}"), seed))


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
    ensure_learned(base(0).compared(20, kind, EXAMPLES // 4))


@pytest.mark.slow
def test_weights_of_bfloat16_hardly_move_and_say_so(base):
    """What the test above finds where weights and optimizer states are stored in bfloat16."""
    found = base(0).compared(20, weights="bfloat16")
    assert found.still > 0.5 and abs(found.share - 1) > 0.05 and found.cosine < 0.98


# In micro-batches of all examples; and of one, where each step adds up 64 gradients over all ranks.
WHOLE = [(kind, 1, seed, 200) for kind in KINDS for seed in range(3)]
PARTS = [(kind, 64, 0, 50) for kind in KINDS]


@only_full
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind, parts, seed, steps", WHOLE + PARTS)
def test_bfloat16_learns_in_many_steps_what_float32_learns(base, kind, parts, seed, steps):
    ensure_learned(base(seed).compared(steps, kind, EXAMPLES // parts))
