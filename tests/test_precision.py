"""Weights, compute and states have the dtypes that the run reports."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import (
    ROOT,
    chats,
    must_succeed,
    only_full,
    read_metrics,
    read_record,
    run_launch,
    run_plugsft,
    start_ranks,
)
from launching import config
from plugin_packages import SEES, activate, install
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, MixtralConfig

from plugsft.base.errors import LaunchError
from plugsft.ranks.launcher import LAUNCHER_ENDED, ensure_settings
from plugsft.ranks.precision import autocast_experts, mixed_precision, on_cpu
from plugsft.recipe.parse import flatten
from plugsft.recipe.read import read, validate
from plugsft.recipe.tables import Model
from plugsft.start.launch_file import ensure_launch_file

SIGNAL_AT_ITS_END = """
import ctypes
from plugsft.start.before_run import watch_launcher

watch_launcher()
number = ctypes.c_int()
PR_GET_PDEATHSIG = 2
ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
print(number.value)
"""
"""Prints the signal that a process gets when its launcher ends."""


def told_of(weights, computes):
    """What the line `precision:` says."""
    return (
        f"weights {weights}, computed in {computes}, gradients summed in {weights}, "
        f"optimizer states {weights}, on cpu"
    )


def summary(run):
    record = read_record(run)
    return record["precision"], record["plugins"][0]["summary"]


def dtype_of(run):
    with safe_open(run / "model/model.safetensors", "pt") as file:
        return {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118  # no dict


def test_states_of_a_plugin_s_optimizer_are_its_own(tiny):
    plugins = {"low_memory_adam": {"kind": "adamw_8bit"}}
    result = must_succeed(tiny(train={"steps": 1}, plugins=plugins))
    assert "gradients summed in float32, on cpu" in result.stdout


@pytest.mark.parametrize(
    "dtype, launcher, weights, computes",
    [
        ("float32", "no", "float32", "float32"),
        ("bfloat16", "bf16", "float32", "bfloat16"),
        ("bfloat16", "no", "bfloat16", "bfloat16"),
    ],
)
def test_a_run_computes_in_the_reported_precision(
    tiny, tmp_path, monkeypatch, dtype, launcher, weights, computes
):
    activate(install(tmp_path / "site", sees=SEES), monkeypatch)
    recipe = tiny(train={"steps": 2}, plugins={"sees": {}}, checkpoint={"every": 0})
    env = {"ACCELERATE_MIXED_PRECISION": launcher}
    result = must_succeed(recipe, f"model.dtype={dtype}", f"model.weights={weights}", env=env)
    says = told_of(weights, computes)
    assert f"precision: {says}" in result.stdout
    assert ("rounds away most of a step" in result.stdout) == (weights == "bfloat16")
    told, seen = summary(tmp_path / "run")
    assert told == says
    computed, states = seen.split("; ")
    assert f"torch.{computes}" in computed
    assert {*states.split(", ")} == {f"torch.{weights}"}, "gradients and optimizer states"
    assert dtype_of(tmp_path / "run") == {getattr(torch, dtype)}
    written = json.loads((tmp_path / "run/model/config.json").read_text())
    assert written["dtype"] == dtype
    [parts] = (tmp_path / "run/checkpoints").glob("step-*/rank-*.safetensors")
    with safe_open(parts, "pt") as file:
        stored = {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118  # no dict
    assert stored <= {getattr(torch, weights), torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, dtype, launcher, weights",
    [
        ("fsdp2", "bfloat16", "no", "float32"),
        pytest.param("fsdp2", "bfloat16", "bf16", "bfloat16", marks=only_full),
        pytest.param("zero3", "bfloat16", "no", "float32", marks=only_full),
    ],
)
def test_sharded_runs_compute_in_the_reported_precision(
    tiny, tmp_path, monkeypatch, kind, dtype, launcher, weights
):
    activate(install(tmp_path / "site", grads=GRADS), monkeypatch)
    train = {"steps": 4, "max_grad_norm": 0.5, "micro_batch": 1}
    # The probe of packing leaves some weights whole under FSDP2, in the type of computing.
    packed = {"bfd_packing": {"capacity": 60, "overlong": "truncate"}}
    recipe = tiny(rows=chats(21), train=train, plugins=packed)
    must_succeed(recipe, f"output={tmp_path / 'alone'}")
    recipe = tiny(rows=chats(21), train=train, plugins=packed | {"grads": {}})
    more = (f"model.dtype={dtype}", f"model.weights={weights}")
    code, out, err = run_launch(
        *config(kind), "--mixed_precision", launcher, "-m", "plugsft", recipe, *more
    )
    assert code == 0, err
    assert f"precision: {told_of(weights, 'bfloat16')}" in out
    curves = [[line["loss"] for line in read_metrics(tmp_path / name)] for name in ("run", "alone")]
    assert curves[0] == pytest.approx(curves[1], rel=2e-2)
    assert curves[0] != curves[1], "computed in less than float32"
    assert dtype_of(tmp_path / "run") == {getattr(torch, dtype)}
    if kind == "fsdp2":
        ensure_sharded(tmp_path / "run")


GRADS = """
    from torch.distributed.fsdp import FSDPModule

    def tensors(group):
        for one in group.fsdp_params:
            whole = getattr(one, "_unsharded_param", None)
            yield one.unsharded_accumulated_grad
            yield None if whole is None else whole.grad
            yield None if one.sharded_param.grad is None else one.sharded_param.grad.to_local()

    @plugin(after=["bfd_packing"])
    class Grads:
        '''Measure the gradients that this rank stores between two micro-batches of a step.'''

        most: int = state(0)
        own: int = state(0)

        @hookimpl(wrapper=True)
        def step(self, model):
            units = [one for one in model.modules() if isinstance(one, FSDPModule)]
            groups = {one._get_fsdp_state()._fsdp_param_group for one in units} - {None}
            found = [one for group in groups for one in tensors(group) if one is not None]
            self.most = max(self.most, sum(one.nbytes for one in found))
            self.own = sum(
                one.to_local().numel() for one in model.parameters() if hasattr(one, "to_local")
            )
            return (yield)

        @hookimpl
        def summary(self):
            return f"{self.most} {self.own}"
"""


def ensure_sharded(run, whole=False):
    """Judge the gradients of a rank by the weights that it stores: 4 bytes of each of its own."""
    plugins = read_record(run)["plugins"]
    [said] = [plugin["summary"] for plugin in plugins if plugin["name"] == "grads"]
    most, own = map(int, said.split())
    print(f"{most:,} bytes of gradients for {own:,} weights of this rank")
    assert most > 0
    assert (most > 4 * own) == whole


@pytest.mark.parametrize(
    "asked, dtype",
    [("bf16", "float32"), ("fp16", "float32"), ("fp8", "bfloat16"), ("bf16", "float16")],
)
def test_a_launcher_that_computes_in_another_type_is_refused(tiny, asked, dtype):
    """Before data is prepared, and by `check`."""
    recipe, environment = tiny(model={"dtype": dtype}), {"ACCELERATE_MIXED_PRECISION": asked}
    says = (
        f"sets mixed_precision = {asked} (ACCELERATE_MIXED_PRECISION), which model.dtype = "
        f"\"{dtype}\" decides: set it to 'no'"
    )
    training, checking = (run_plugsft(*words, recipe, env=environment) for words in ([], ["check"]))
    for result in (training, checking):
        assert result.returncode == 2 and says in result.stderr, result.stderr
        assert "Traceback" not in result.stderr
    assert "data:" not in training.stdout


# Stands for a machine on which a variable is set.
ON_ONE_RANK = """
    import os

    if os.environ.get("RANK") == "1":
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"

    @plugin()
    class Alone:
        pass
"""


def test_a_launcher_of_another_type_on_one_rank_is_refused(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", alone=ON_ONE_RANK), monkeypatch)
    first, second = start_ranks(2, tiny(plugins={"alone": {}}), env={"OMP_NUM_THREADS": "1"})
    refused = second.wait()
    first.process.terminate()  # by the launcher
    assert refused.returncode == 2 and "sets mixed_precision = bf16" in refused.stderr
    assert "step 1" not in first.wait().stdout


def test_check_names_a_default_launch_file_of_another_type(tiny, tmp_path):
    file = tmp_path / "accelerate/default_config.yaml"
    file.parent.mkdir()
    file.write_text("mixed_precision: bf16\ndynamo_config: {dynamo_backend: 'NO'}\n")
    recipe, environment = tiny(), {"HF_HOME": str(tmp_path)}
    result = run_plugsft("check", recipe, env=environment)
    assert f"`plugsft launch` would be refused: {file} sets mixed_precision" in result.stdout
    assert result.returncode == 0, "it may be started otherwise"
    result = run_plugsft("check", recipe, "model.dtype=bfloat16", env=environment)
    assert "would be refused" not in result.stdout


@pytest.mark.parametrize("name", ["cpu1", "cpu2", "fsdp2", "gpu8", "zero3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_our_launch_files_suit_each_type(tiny, name, dtype):
    recipe, _ = validate(read(tiny(model={"dtype": dtype})), "recipe")
    ensure_launch_file(ROOT / f"recipes/accelerate/{name}.yaml", recipe)


def test_weights_of_float16_are_refused(tiny):
    result = run_plugsft(tiny(), "model.weights=float16")
    assert result.returncode == 2 and "model.weights: given 'float16'" in result.stderr


@pytest.mark.parametrize(
    "chosen",
    [
        {"fp16": {"enabled": True}},
        {"bf16": {"enabled": False}},
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"communication_data_type": "bf16"},
        {"data_types": {"grad_accum_dtype": "bf16"}},
        {"gradient_clipping": 0.5},
        {"gradient_accumulation_steps": 4},
        {"train_batch_size": 64},
        {"train_micro_batch_size_per_gpu": 7},
        {"zero_optimization": {"stage": 2}},
    ],
    ids=str,
)
def test_a_deepspeed_file_that_contradicts_the_recipe_is_refused(tiny, chosen):
    recipe, _ = validate(read(tiny(model={"dtype": "bfloat16"})), "recipe")
    fits = {"bf16": {"enabled": True}, "fp16": {"enabled": False}, "gradient_clipping": 1.0}
    fits |= {"zero_optimization": {"stage": 3}}
    ensure_settings(flatten(fits), recipe, "the DeepSpeed file")
    [name] = chosen
    with pytest.raises(LaunchError, match=f"the DeepSpeed file sets {name}.* decides: set it to"):
        ensure_settings(flatten(fits | chosen), recipe, "the DeepSpeed file")


@pytest.mark.slow
def test_autocast_of_a_deepspeed_file_is_refused(tiny, tmp_path):
    settings = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}
    settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    (tmp_path / "zero3.json").write_text(json.dumps(settings))
    file = tmp_path / "zero3.yaml"
    file.write_text(
        "distributed_type: DEEPSPEED\nnum_machines: 1\n"
        f"deepspeed_config: {{deepspeed_config_file: {tmp_path}/zero3.json}}\n"
    )
    words = ("--config_file", file, "--num_processes", 1, "-m", "plugsft", tiny())
    code, out, err = run_launch(*words)
    assert code == 2 and "step 1" not in out
    assert "the DeepSpeed file sets torch_autocast.enabled = True" in err


def test_a_gpu_is_not_left_idle_unless_the_recipe_says_so(tiny, monkeypatch):
    recipe, _ = validate(read(tiny()), "recipe")
    quiet, _ = validate(read(tiny(device="cpu")), "recipe")
    assert on_cpu(recipe), "there is no GPU here"
    # What torch answers where there is one; nothing of it is touched before the refusal.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not on_cpu(recipe) and on_cpu(quiet)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert on_cpu(quiet)
    with pytest.raises(LaunchError, match='device = "cpu"'):
        on_cpu(recipe)


def test_the_recipe_alone_chooses_bfloat16(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    half, whole = (Model(path="m", dtype=dtype) for dtype in ("bfloat16", "float32"))
    pure = Model(path="m", dtype="bfloat16", weights="bfloat16")
    assert mixed_precision(half, deepspeed=True) == mixed_precision(half, deepspeed=False) == "bf16"
    assert mixed_precision(whole, deepspeed=True) == mixed_precision(pure, deepspeed=False) == "no"
    with pytest.raises(LaunchError, match="ZeRO-3 stores and updates weights in float32"):
        mixed_precision(pure, deepspeed=True)


def test_weights_of_bfloat16_need_to_be_computed_with_as_they_are(tiny):
    result = run_plugsft("check", tiny(), "model.weights=bfloat16")
    assert result.returncode == 2 and 'needs dtype = "bfloat16"' in result.stderr
    result = run_plugsft("check", tiny(model={"dtype": "bfloat16", "weights": "bfloat16"}))
    assert result.returncode == 0 and "rounds away most of a step" in result.stdout


@pytest.mark.parametrize(
    "name, watched",
    [
        ("ACCELERATE_MIXED_PRECISION", False),  # people export it themselves
        ("ACCELERATE_DYNAMO_BACKEND", True),
        ("TORCHELASTIC_RUN_ID", True),
    ],
)
def test_only_a_launcher_is_watched(monkeypatch, name, watched):
    """A run in the background goes on when its shell ends, whatever the user has exported."""
    for sign in ("ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(sign, raising=False)
    monkeypatch.setenv(name, "no")
    result = subprocess.run([sys.executable, "-c", SIGNAL_AT_ITS_END], stdout=subprocess.PIPE)
    assert int(result.stdout) == (LAUNCHER_ENDED if watched else 0)


@pytest.mark.parametrize("steps", ["4", "auto"])
def test_no_environment_divides_the_gradients(tiny, steps):
    """accelerate divides every loss by this variable, which its launcher sets from a file."""
    environment = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": steps}
    result = run_plugsft(tiny(), env=environment)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert f"sets gradient_accumulation_steps = {steps} " in result.stderr
    assert "train.batch_size and train.micro_batch" in result.stderr


def test_whole_gradients_without_fsdp2_are_refused_before_data_are_prepared(tiny, tmp_path):
    """`check` warns: it need not know the launch."""
    words = (tiny(), "train.keep_whole_gradients=true")
    alone = run_plugsft(*words)
    assert alone.returncode == 2 and "train.keep_whole_gradients is for FSDP2" in alone.stderr
    assert not (tmp_path / "run/tokens").exists()
    checked = must_succeed("check", *words)
    assert "launch      train.keep_whole_gradients is for FSDP2" in checked.stdout


@pytest.mark.slow
def test_whole_gradients_are_stored_under_fsdp2_only_where_asked_for(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", grads=GRADS), monkeypatch)
    recipe = tiny(train={"steps": 3, "micro_batch": 1}, plugins={"grads": {}})
    words = ("-m", "plugsft", recipe)
    code, _, err = run_launch(*config("fsdp2"), *words, "train.keep_whole_gradients=true")
    assert code == 0, err
    ensure_sharded(tmp_path / "run", whole=True)


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm", "eager"])
def test_experts_compute_in_bfloat16_under_autocast(experts):
    autocast_experts()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 60}
    config = MixtralConfig(
        **sizes, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    config._experts_implementation = experts
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(60, (2, 30))
    exact = model(ids, labels=ids, use_cache=False).loss
    [module] = [one for one in model.modules() if type(one).__name__ == "MixtralExperts"]
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2) and loss != exact
    products = Products()
    with products, torch.autocast("cpu", torch.bfloat16):
        module(torch.randn(8, 32), torch.zeros(8, 1, dtype=torch.int64), torch.ones(8, 1))
    assert products.types == {torch.bfloat16}, "of what is multiplied"
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


class Products(TorchDispatchMode):
    """Note the types of matrices that are multiplied."""

    def __init__(self):
        super().__init__()
        self.types = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mm" in str(func):
            self.types |= {
                one.dtype
                for one in args
                if isinstance(one, torch.Tensor) and one.is_floating_point()
            }
        return func(*args, **(kwargs or {}))
