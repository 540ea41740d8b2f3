"""low_memory_adam learns what float32 AdamW learns, with less memory, and resumes bit for bit."""

import functools
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import only_full, run_launch, run_plugsft, tiny_tables, write_recipe
from launching import EXAMPLES, TrainedBase, config

from plugsft import testing
from plugsft.plugins.low_memory_adam import corrected
from plugsft.plugins.low_memory_adam.corrected import (
    CorrectedAdamW,
    hash_of,
    random_bits,
    round_at_random,
)

CORRECTED = {"low_memory_adam": {"kind": "corrected"}}
EIGHT_BIT = {"low_memory_adam": {"kind": "adamw_8bit"}}
NARROW = {"model": {"dtype": "bfloat16", "weights": "bfloat16"}}
COUNT = 1 << 18


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return functools.cache(lambda seed: TrainedBase(tmp_path_factory.mktemp(f"seed-{seed}"), seed))


def bits(seed=0, step=1, number=1):
    return random_bits(torch.arange(COUNT), torch.tensor(hash_of(seed, step, number)))


@pytest.mark.parametrize("value", [1 + 2**-10, -1 - 2**-9, 3e-5, 0.0, 1e-40])
def test_rounding_goes_to_a_neighbour_and_is_exact_on_average(value):
    values = torch.full((COUNT,), value)
    for shift in (0, 16, 32):
        rounded = round_at_random(values, bits() >> shift).float()
        neighbours = rounded.unique()
        assert len(neighbours) <= 2
        distance = float(neighbours[-1] - neighbours[0])
        error = abs(float(rounded.double().mean()) - float(values[0]))
        deviation = distance / 2 / COUNT**0.5  # of the mean of COUNT coin flips
        assert error <= 5 * deviation


def test_infinity_and_nan_stay():
    values = torch.tensor([float("inf"), -float("inf"), float("nan")])
    rounded = round_at_random(values, torch.full((3,), -1)).float()
    assert rounded[:2].equal(values[:2]) and rounded[2].isnan()


def test_random_bits_of_positions_steps_and_weights_are_unrelated():
    kinds = [bits(), bits(seed=1), bits(step=2), bits(number=2), bits().roll(1)]
    parts = [each >> shift & 0xFFFF for each in kinds for shift in (0, 16, 32)]
    related = np.corrcoef(torch.stack(parts).double().numpy()) - np.eye(len(parts))
    assert abs(related).max() < 6 / COUNT**0.5


def test_each_step_is_adamw_of_torch_before_rounding(monkeypatch):
    monkeypatch.setattr(corrected, "round_at_random", lambda values, bits: values)
    monkeypatch.setitem(corrected.CHUNK, "cpu", 7)
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in [(5, 6), (3,)]]
    twins = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    settings = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6}
    groups = [
        [{"params": each[:1], "weight_decay": 0.3}, {"params": each[1:], "weight_decay": 0.0}]
        for each in (weights, twins)
    ]
    ours = CorrectedAdamW(groups[0], **settings, seed=0)
    plain = torch.optim.AdamW(groups[1], **settings)
    for _ in range(5):
        for weight, twin in zip(weights, twins, strict=True):
            weight.grad = torch.randn_like(weight)
            twin.grad = weight.grad.clone()
        ours.step()
        plain.step()
    for weight, twin in zip(weights, twins, strict=True):
        torch.testing.assert_close(weight, twin, rtol=1e-6, atol=1e-7)


def steps_of(weight, gradients):
    """Return a weight after steps with these gradients."""
    optimizer = CorrectedAdamW([{"params": [weight]}], 1e-3, (0.9, 0.999), 1e-8, seed=3)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    return weight.detach()


@only_full
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_as_on_a_gpu_it_computes_the_same_bits(monkeypatch):
    torch.manual_seed(0)
    weight = torch.randn(300, 7).bfloat16()
    gradients = [torch.randn_like(weight) for _ in range(3)]
    plain = steps_of(torch.nn.Parameter(weight.clone()), gradients)
    compiled = torch.compile(corrected.update_chunk, dynamic=True, fullgraph=True)
    monkeypatch.setattr(corrected, "_update_for", lambda device: compiled)
    monkeypatch.setitem(corrected.CHUNK, "cpu", 1000)
    assert steps_of(torch.nn.Parameter(weight.clone()), gradients).equal(plain)


@pytest.mark.slow
@pytest.mark.parametrize("plugins, narrow", [(CORRECTED, True), (EIGHT_BIT, False)])
def test_it_learns_what_float32_learns(base, plugins, narrow):
    ensure_falls(base(0), 20, plugins, narrow, tolerance=0.1)


@only_full
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("plugins, narrow", [(CORRECTED, True), (EIGHT_BIT, False)])
def test_it_learns_over_200_steps_what_float32_learns(base, plugins, narrow, seed):
    ensure_falls(base(seed), 200, plugins, narrow, tolerance=0.05)


@only_full
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gradients_of_64_micro_batches_add_up_in_bfloat16(base):
    ensure_falls(base(0), 200, CORRECTED, narrow=True, tolerance=0.05, micro=1)


def ensure_falls(base, steps, plugins, narrow, tolerance, micro=EXAMPLES):
    keys = {"weights": "bfloat16"} if narrow else {"dtype": "float32"}
    found = base.compared(steps, None, micro, plugins=plugins, **keys)
    assert found.share == pytest.approx(1, abs=tolerance)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "plugins, tables", [(CORRECTED, NARROW), (EIGHT_BIT, {})], ids=["corrected", "8bit"]
)
def test_it_resumes_bit_for_bit(plugins, tables, ranks):
    [(name, options)] = plugins.items()
    testing.resumes(name, options, tables=tables, ranks=ranks)


@pytest.mark.parametrize(
    "plugins, tables, tolerance",
    [(CORRECTED, NARROW, 2e-2), (EIGHT_BIT, {}, 1e-4)],
    ids=["corrected", "8bit"],
)
def test_two_ranks_agree(plugins, tables, tolerance):
    [(name, options)] = plugins.items()
    testing.ranks_agree(name, options, tables=tables, tolerance=tolerance)


SHARDED = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from plugsft.plugins.low_memory_adam.corrected import CorrectedAdamW

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))


def steps_of(make, weight, gradients):
    parameter = torch.nn.Parameter(make(weight.clone()))
    groups = [{"params": [parameter], "weight_decay": 0.1}]
    optimizer = CorrectedAdamW(groups, 1e-3, (0.9, 0.999), 1e-8, seed=3)
    for gradient in gradients:
        parameter.grad = make(gradient.clone())
        optimizer.step()
    state = optimizer.state[parameter]
    return [parameter.detach(), state["exp_avg"], state["exp_avg_sq"]]


for shape in ((5, 7), (8, 3), (1, 4), (9,)):
    torch.manual_seed(0)
    weight, *gradients = [torch.randn(shape).bfloat16() for _ in range(4)]
    whole = steps_of(lambda tensor: tensor, weight, gradients)
    divide = lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])
    sharded = steps_of(divide, weight, gradients)
    for expected, parts in zip(whole, sharded, strict=True):
        assert expected.equal(parts.full_tensor()), shape
dist.destroy_process_group()
"""


@only_full
def test_weights_that_fsdp2_divides_are_rounded_to_the_same_bits(tmp_path):
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def refused(tmp_path, plugins, kind=None, **model):
    tables = tiny_tables(tmp_path) | {"plugins": plugins}
    tables["model"] |= model
    recipe = write_recipe(tmp_path / "recipe.toml", tables)
    if kind is None:
        done = run_plugsft(recipe)
        code, err = done.returncode, done.stderr
    else:
        code, _, err = run_launch(*config(kind), "-m", "plugsft", recipe)
    assert code and "Traceback" not in err, err
    return err


def test_weights_of_the_wrong_type_are_refused(tmp_path):
    assert 'set model.dtype = "bfloat16"' in refused(tmp_path, CORRECTED)
    narrow = {"dtype": "bfloat16", "weights": "bfloat16"}
    assert 'set kind = "corrected"' in refused(tmp_path, EIGHT_BIT, **narrow)


def test_a_paged_kind_needs_a_gpu(tmp_path):
    assert "needs an NVIDIA GPU" in refused(
        tmp_path, {"low_memory_adam": {"kind": "paged_adamw_8bit"}}
    )


@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("zero3", marks=only_full)])
def test_blocks_of_8_bits_are_refused_where_weights_are_divided(tmp_path, kind):
    assert "quantizes moments in blocks of a whole weight" in refused(tmp_path, EIGHT_BIT, kind)
