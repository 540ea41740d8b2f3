"""Tiny runs with checkpoints: trained, resumed, and read back."""

import json
import os
import shutil
import socket
import traceback
from functools import partial

import optimizers
import torch
from conftest import chats, must_succeed, tiny_tables, write_recipe
from forks import FORKS
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from plugsft.base.atomic import list_checkpoints, parse_step
from plugsft.base.errors import PlugsftError
from plugsft.base.machine import look
from plugsft.checkpoint.contents import Contents
from plugsft.checkpoint.same_run import keys_affecting_results
from plugsft.checkpoint.save import Checkpoints
from plugsft.checkpoint.state import TrainState
from plugsft.model.load import ModelLoad
from plugsft.ranks.connect import connect
from plugsft.ranks.loss_scale import LossScale
from plugsft.ranks.sharding import shard_model, weights_of
from plugsft.ranks.weights import ZeroWeights
from plugsft.registry.active import Active
from plugsft.registry.load import load


def write(folder, name="recipe", **tables):
    """Write a tiny recipe with these tables, whose output is `folder / name`."""
    tables = {"output": str(folder / name)} | tables
    return write_recipe(folder / f"{name}.toml", tiny_tables(folder, chats(24)) | tables)


def train(folder, name="recipe", **tables):
    """Train a tiny recipe with these tables; return the run's folder."""
    must_succeed(write(folder, name, **tables))
    return folder / name


def forget(run, after):
    """Remove the model, and the checkpoints after a step."""
    for folder in list_checkpoints(run / "checkpoints"):
        if parse_step(folder) > after:
            shutil.rmtree(folder)
    shutil.rmtree(run / "model")


def resume(run, recipe, after):
    """Go on in one process, after a step."""
    forget(run, after)
    must_succeed(recipe, f"output={run}", "--resume")


def checkpoint(run, step):
    return run / f"checkpoints/step-{step:06d}"


def stored(folder):
    """Return all tensors of a checkpoint, whichever ranks wrote them."""
    parts, shapes = {}, {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name, (start, shape) in json.loads(file.metadata()["places"]).items():
                parts.setdefault(name, {})[start] = file.get_tensor(name)
                shapes[name] = shape
    return {
        name: torch.cat([parts[name][start] for start in sorted(parts[name])]).view(shape)
        for name, shape in shapes.items()
    }


def read(folder, kind="model"):
    """Return the tensors of a kind in float32."""
    return {
        name.removeprefix(f"{kind}/"): values.float()
        for name, values in stored(folder).items()
        if name.startswith(f"{kind}/")
    }


def model_of(run):
    return load_file(run / "model/model.safetensors")


def initial_weights(run):
    [folder] = (run / "scratch").glob("model-*")
    return load_file(folder / "model.safetensors")


def evaluations(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["eval_loss"] for line in lines if "eval_loss" in line]


def assert_equal(tensors, expected):
    """Compare every bit."""
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def assert_close(tensors, expected, atol=1e-7):
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name].double(), tensor.double(), rtol=2e-7, atol=atol)


class Run:
    """A model, its optimizer and its checkpoints, as a run has them."""

    def __init__(self, name, accelerator, recipe, active, seed=0, make=None, dtype=None):
        set_seed(seed)
        if accelerator.state.deepspeed_plugin:
            # accelerate would go on with the engine of the run before.
            accelerator.deepspeed_engine_wrapped = None
        config = LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=41,  # its rows are not divisible by two
            tie_word_embeddings=False,
        )
        model = LlamaForCausalLM(config)
        model = model.to(dtype or (torch.bfloat16 if name == "Masters" else torch.float32))
        if name == "Muon":
            for one in model.parameters():
                one.requires_grad_(one.dim() == 2)
        make = make or optimizers.ALL[name]
        self.model, self.optimizer = shard_model(accelerator, ModelLoad(""), model, make)
        self.accelerator = accelerator
        self.identity = partial(keys_affecting_results, recipe, active)
        self.held = weights_of(accelerator, self.model, self.optimizer)
        self.state = TrainState(self.held, self.optimizer, LossScale(accelerator))
        # The plugin that made an optimizer keeps what no state of a weight has.
        if hasattr(self.state.optimizer, "kept"):
            keeper = optimizers.Keeper()
            keeper.made = self.state.optimizer
            active = Active({"keeper": keeper}, {}).attach()
        contents = Contents()
        contents.read_weights({})
        self.checkpoints = Checkpoints(recipe, active, accelerator, self.state, 100, 10, contents)

    def train(self, steps):
        for step in steps:
            made = torch.Generator().manual_seed(1000 * step + self.accelerator.process_index)
            ids = torch.randint(41, (2, 6), generator=made)
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-2 / step
            self.accelerator.backward(self.model(input_ids=ids, labels=ids).loss)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def everything(self, full=False):
        """Return all of its weights and of its optimizer, as plain values; `full`: of all ranks."""
        if isinstance(self.held, ZeroWeights):
            description, shards = self.state.describe({})
            values = part({k: v.values for k, v in shards.items()})
            return {"description": description, "shards": values}
        plain = whole if full else part
        kept, states = self.held.parameters(trained_only=False), self.optimizer.state
        names = {id(one): name for name, one in kept.items()}
        state = {names.get(id(key), key): plain(value) for key, value in states.items()}
        groups = [
            {key: plain(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        weights = {name: plain(one) for name, one in kept.items()}
        inner = [
            {names[id(key)]: plain(value) for key, value in optimizer.state.items()}
            for optimizer in getattr(self.optimizer, "inner", [])
        ]
        own = {key: getattr(self.optimizer, key, None) for key in ("total", "last")}
        return {"weights": weights, "state": state, "inner": inner, "groups": groups, "own": own}


def part(value):
    """Return a value so that any difference in type, kind of number or bits is seen."""
    if isinstance(value, Tensor):
        local = value.detach().to_local() if isinstance(value, DTensor) else value.detach()
        bits = local.contiguous().flatten().view(torch.uint8).tolist() if local.numel() else []
        kind = "DTensor" if isinstance(value, DTensor) else "Tensor"
        return [kind, str(value.dtype), [*value.shape], bits]
    if isinstance(value, dict):
        return {f"{type(key).__name__} {key}": part(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, [part(one) for one in value]]
    return [type(value).__name__, repr(value)]


def whole(value):
    """Return the same of all ranks together."""
    return part(tree_map(lambda one: one.full_tensor() if isinstance(one, DTensor) else one, value))


def differing(one, other, where=""):
    """Name what differs first."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        found = (differing(one[key], other[key], f"{where}/{key}") for key in one)
        return next((difference for difference in found if difference), "")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        found = (
            differing(a, b, f"{where}/{n}") for n, (a, b) in enumerate(zip(one, other, strict=True))
        )
        return next((difference for difference in found if difference), "")
    return "" if one == other else f"{where}: {str(one)[:90]} and {str(other)[:90]}"


def work_on_rank(rank, ranks, port, env, folder, work, answers):
    os.environ.update(env, OMP_NUM_THREADS="1")
    if ranks > 1 or env:
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(ranks),
            LOCAL_WORLD_SIZE=str(ranks),
        )
    torch.set_num_threads(1)
    recipe, active = load(folder / "recipe.toml")
    accelerator = connect(recipe, look())
    results = {}
    for name, operation in work:
        try:
            results[name] = operation(name, accelerator, recipe, active)
        except PlugsftError as error:
            results[name] = f"refused: {error}"
        except Exception:
            results[name] = traceback.format_exc()
    answers.put((rank, results))


def on_ranks(ranks, env, folder, work, dtype="float32"):
    """Run some work on several ranks; return the results of each rank, by name."""
    tables = tiny_tables(folder) | {"output": str(folder / "run"), "checkpoint": {"keep": 100}}
    tables["model"]["dtype"] = dtype
    write_recipe(folder / "recipe.toml", tables)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = FORKS.Queue()
    processes = [
        FORKS.Process(target=work_on_rank, args=(rank, ranks, port, env, folder, work, answers))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=300) for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return [found[rank] for rank in range(ranks)]
