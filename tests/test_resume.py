"""An optimizer goes on from a checkpoint as if it had never stopped: every kind of its state."""

import os
import socket
import traceback
from functools import cache
from types import SimpleNamespace

import optimizers
import pytest
import torch
from conftest import FORKS, tiny_tables, write_recipe
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from plugsft import CheckpointError
from plugsft.checkpoint import Checkpoints
from plugsft.held import held_by
from plugsft.machine import look
from plugsft.models import Load
from plugsft.ranks import connect
from plugsft.registry import load
from plugsft.spread import spread

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}


class Run:
    """A model, its optimizer and its checkpoints, as a run has them."""

    def __init__(self, name, accelerator, recipe, active, seed=0, make=None):
        set_seed(seed)
        config = LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=41,  # its rows are not divisible by two
            tie_word_embeddings=False,
        )
        model = LlamaForCausalLM(config)
        if name == "Masters":
            model = model.to(torch.bfloat16)
        if name == "Muon":
            for one in model.parameters():
                one.requires_grad_(one.dim() == 2)
        make = make or optimizers.ALL[name]
        self.model, self.optimizer = spread(accelerator, Load(""), model, make)
        self.accelerator = accelerator
        self.held = held_by(accelerator, self.model, self.optimizer)
        tokens = SimpleNamespace(facts={"key": "tokens"})
        self.checkpoints = Checkpoints(recipe, active, tokens, accelerator, self.held, 100)

    def train(self, steps):
        for step in steps:
            made = torch.Generator().manual_seed(1000 * step + self.accelerator.process_index)
            ids = torch.randint(41, (2, 6), generator=made)
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-2 / step
            self.accelerator.backward(self.model(input_ids=ids, labels=ids).loss)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def everything(self):
        """Return all of its weights and of its optimizer, as plain values."""
        names = {id(one): name for name, one in self.held.parameters(trained=False).items()}
        state = {
            names.get(id(key), key): plain(value) for key, value in self.optimizer.state.items()
        }
        groups = [
            {key: plain(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        weights = {name: plain(one) for name, one in self.held.parameters(trained=False).items()}
        return {
            "weights": weights,
            "state": state,
            "groups": groups,
            "total": getattr(self.optimizer, "total", None),
        }


def plain(value):
    """Return a value so that any difference in type, kind of number or bits is seen."""
    if isinstance(value, Tensor):
        local = value.detach().to_local() if isinstance(value, DTensor) else value.detach()
        bits = local.contiguous().flatten().view(torch.uint8).tolist() if local.numel() else []
        kind = "DTensor" if isinstance(value, DTensor) else "Tensor"
        return (kind, str(value.dtype), tuple(value.shape), value.requires_grad, bits)
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return (type(value).__name__, [plain(one) for one in value])
    return (type(value).__name__, repr(value))


def differing(one, other, where=""):
    """Name what differs first."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        found = (differing(one[key], other[key], f"{where}/{key}") for key in one)
        return next((said for said in found if said), "")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        found = (
            differing(a, b, f"{where}/{n}") for n, (a, b) in enumerate(zip(one, other, strict=True))
        )
        return next((said for said in found if said), "")
    return "" if one == other else f"{where}: {str(one)[:90]} and {str(other)[:90]}"


def resumed_is_uninterrupted(name, accelerator, recipe, active):
    """Say in what a resumed run differs from one that went through."""
    whole = Run(name, accelerator, recipe, active)
    whole.train(range(1, 4))
    whole.checkpoints.save(3)
    saved = whole.everything()
    whole.train(range(4, 7))
    parts = Run(name, accelerator, recipe, active, seed=1)
    parts.checkpoints.restore([recipe.folder / "checkpoints/step-000003"])
    for group in parts.optimizer.param_groups:
        group["lr"] = 1e-2 / 3
    restored = differing(saved, parts.everything(), "restored")
    parts.train(range(4, 7))
    return restored or differing(whole.everything(), parts.everything(), "trained on")


def _rank(rank, ranks, port, env, folder, work, answers):
    os.environ.update(env, OMP_NUM_THREADS="1")
    if ranks > 1:
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
    said = {}
    for name, operation in work:
        try:
            said[name] = operation(name, accelerator, recipe, active)
        except CheckpointError as error:
            said[name] = f"refused: {error}"
        except Exception:
            said[name] = traceback.format_exc()
    answers.put((rank, said))


def on_ranks(ranks, env, folder, work):
    """Do work on so many ranks; return what each said of each piece."""
    tables = tiny_tables(folder) | {"output": str(folder / "run"), "checkpoint": {"keep": 100}}
    write_recipe(folder / "recipe.toml", tables)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = FORKS.Queue()
    processes = [
        FORKS.Process(target=_rank, args=(rank, ranks, port, env, folder, work, answers))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=300) for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return [found[rank] for rank in range(ranks)]


# Optimizers of torch that use what DTensors cannot do.
NOT_ON = {"FSDP2": ["Rprop", "Adafactor"]}
KINDS = {"one process": (1, {}), "DDP": (2, {}), "FSDP2": (2, FSDP2)}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Give `said(kind)`: what each rank said of each optimizer; a kind is launched once."""

    @cache
    def of(kind):
        ranks, env = KINDS[kind]
        names = [name for name in optimizers.ALL if name not in NOT_ON.get(kind, [])]
        work = [(name, resumed_is_uninterrupted) for name in names]
        return on_ranks(ranks, env, tmp_path_factory.mktemp(kind.replace(" ", "-")), work)

    return of


@pytest.mark.parametrize(
    "kind, name",
    [(k, name) for k in KINDS for name in optimizers.ALL if name not in NOT_ON.get(k, [])],
)
def test_resumed_is_uninterrupted_with_any_optimizer(said, kind, name):
    for answers in said(kind):
        assert answers[name] == ""
