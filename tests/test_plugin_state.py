"""Plugins read and write this rank's weights; checkpoints hold their state on any ranks."""

import json
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from launching import FSDP2, ZERO3
from saved_runs import Run, differing, on_ranks, part
from transformers import LlamaForCausalLM

from plugsft import PluginError, WeightSlice, hookimpl, plugin, state
from plugsft.checkpoint.files import ShardReader, copy_to_host, owned_shards, write_shards
from plugsft.checkpoint.tree import Encoder
from plugsft.ranks.agree import are_alike
from plugsft.registry.active import Active


@plugin()
class Counter:
    """Keeps what a test says."""

    seen: Any = state()

    @hookimpl
    def state_dict(self):
        return {"seen": self.seen}

    @hookimpl
    def load_state_dict(self, state):
        self.seen = state["seen"]


# Under ZeRO-3 in bfloat16, the forward pass computes with copies of the float32 weights.
KINDS = {
    "ZeRO-3": (2, ZERO3, "bfloat16"),
    "FSDP2": (2, FSDP2, "float32"),
    "DDP": (2, {}, "float32"),
    "one process": (1, {}, "float32"),
}


def make_run(accelerator, recipe, active, seed=0):
    """Make a run; under ZeRO-3, some of its weights stay whole between steps, others do not."""
    if accelerator.state.deepspeed_plugin:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 300
    return Run("AdamW", accelerator, recipe, active, seed=seed)


def whole_weights(run):
    return {name: run.held.whole(one).clone() for name, one in run.held.parameters().items()}


def loss_of(model):
    ids = torch.arange(12).view(2, 6)
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss.item()


def loss_with(run, weights):
    """The loss of a plain model with these weights."""
    model = LlamaForCausalLM(run.held.plain.config)
    model.load_state_dict(weights)
    return loss_of(model)


def swap_weights(kind, accelerator, recipe, active):
    """Swap the weights for an evaluation in the middle of training."""
    run = make_run(accelerator, recipe, active)
    run.train(range(1, 4))
    trained, shards = loss_of(run.model), {k: v.clone() for k, v in run.held.shards().items()}
    run.held.set_shards({name: shard * 0.5 for name, shard in shards.items()})
    halves = whole_weights(run)
    swapped = loss_of(run.model), loss_with(run, halves)
    run.held.set_shards(shards)
    restored = loss_of(run.model)
    originals = whole_weights(run)
    run.model.train()
    run.train(range(4, 6))
    straight = make_run(accelerator, recipe, active)
    straight.train(range(1, 6))
    unchanged = part(straight.held.shards()) == part(run.held.shards())
    return {
        "types": [str(shard.dtype) for shard in shards.values()],
        "shapes": {name: [*shard.shape] for name, shard in shards.items()},
        "trained": trained,
        "swapped": swapped,
        "restored": restored,
        "halved": all(torch.equal(halves[name], originals[name] * 0.5) for name in halves),
        "training unchanged": unchanged,
    }


def plugin_states(run):
    """Return states with every kind of value; all follow from the weights."""
    slices = {name: WeightSlice(name, 2 * shard) for name, shard in run.held.shards().items()}
    shard = run.held.shards()["model.norm.weight"]
    return {
        "average": {"slices": slices, "updates": 3, "rate": 0.1},
        "kinds": {
            "codes": WeightSlice("model.norm.weight", (shard * 100).to(torch.uint8)),
            "half": [WeightSlice("model.norm.weight", shard.bfloat16())],
            "plain": [
                1,
                None,
                "text",
                True,
                [2.5, float("inf")],
                {"a b": [], "dict": {"tensor": {"slice": 1}}},
                {},
            ],
            "small": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
            "scalar": torch.tensor(7, dtype=torch.int8),
            "large": torch.arange(5000, dtype=torch.int16).view(2, -1),
            "a/b": torch.ones(5000),
            "a": {"b": torch.zeros(5000, dtype=torch.bool)},
        },
        "nothing": {},
    }


def as_plain(tree):
    """Return a tree of plugin state so that any difference is seen."""
    if isinstance(tree, WeightSlice):
        return ["WeightSlice", tree.weight, part(tree.values)]
    if isinstance(tree, dict):
        return {key: as_plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [type(tree).__name__, [as_plain(value) for value in tree]]
    return part(tree)


def save_states(folder, kind, accelerator, recipe, active):
    """Save the states of plugins."""
    run = make_run(accelerator, recipe, active)
    run.train(range(1, 3))
    folder.mkdir(exist_ok=True)
    description, shards = run.state.describe(plugin_states(run))
    owned = owned_shards(run.held.rank, shards)
    write_shards(folder, run.held.rank, copy_to_host({}, owned))
    text = json.dumps(description)
    if run.held.rank == 0:
        (folder / "description.json").write_text(text)
    accelerator.wait_for_everyone()
    return are_alike(text)


def restore_states(folder, kind, accelerator, recipe, active):
    """Restore the states that any ranks saved; say in what they differ from these ranks' own."""
    run = make_run(accelerator, recipe, active, seed=1)
    description = json.loads((folder / "description.json").read_text())
    reader = ShardReader(folder, run.held.rank, run.held.ranks)
    states = run.state.restore(reader, description)
    return differing(as_plain(plugin_states(run)), as_plain(states))


def save_differing_ranks(folder, part, accelerator, recipe, active):
    """Save a run whose plugin has other state on each rank."""
    recipe = recipe.model_copy(update={"output": str(folder / part)})
    run = make_run(accelerator, recipe, active)
    run.train(range(1, 3))
    run.checkpoints.save(2)
    if part == "plugin":
        counter = Counter()
        counter.seen = [0, run.held.rank]
        run.checkpoints._active = Active({"counter": counter}, {}).attach()
    else:
        weight = run.held.parameters()["model.norm.weight"]
        run.optimizer.state[weight]["noise"] = torch.tensor(run.held.rank)
    run.train(range(3, 5))
    try:
        run.checkpoints.save(4)
    finally:
        left = sorted(path.name for path in run.checkpoints.folder.iterdir())
        assert left == ["step-000002"], left


def refuse_states(kind, accelerator, recipe, active):
    """Try to save states that cannot be stored."""
    run, errors = make_run(accelerator, recipe, active), {}
    norm = "model.norm.weight"
    for name, kept in {
        "a set": {"names": [{1}]},
        "complex": {"phase": torch.ones(2, dtype=torch.complex128)},
        "sparse": {"rows": torch.eye(2).to_sparse()},
        "a number as key": {"epochs": {2: 2}},
        "a tuple": {"pair": (1, 2)},
        "a number of NumPy": {"share": np.float32(0.1)},
        "no such weight": WeightSlice("norm", torch.zeros(16)),
        "another shape": {"slice": WeightSlice(norm, torch.zeros(15))},
    }.items():
        try:
            run.state.describe({"average": kept})
        except PluginError as error:
            errors[name] = str(error)
    for name, shards in {
        "no trained weight": {"norm": torch.zeros(16)},
        "a part too long": {norm: torch.zeros(17)},
    }.items():
        try:
            run.held.ensure_fitting(shards)
        except PluginError as error:
            errors[name] = str(error)
    return errors


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Work on ranks of each kind; they restore what these and those before have saved."""
    source, answers = tmp_path_factory.mktemp("states"), {}
    for number, (kind, (ranks, env, dtype)) in enumerate(KINDS.items()):
        work = [("swap", swap_weights), ("refuse", refuse_states)]
        work.append(("save", partial(save_states, source / kind)))
        for first in [*KINDS][: number + 1]:
            work.append((first, partial(restore_states, source / first)))
        if kind == "DDP":
            saves = partial(save_differing_ranks, source / "differing")
            work += [("plugin", saves), ("optimizer", saves)]
        answers[kind] = on_ranks(ranks, env, tmp_path_factory.mktemp("ranks"), work, dtype)
    return answers


@pytest.mark.parametrize("kind", KINDS)
def test_a_plugin_swaps_the_weights_and_puts_them_back(answers, kind):
    for answer in answers[kind]:
        seen = answer["swap"]
        assert not isinstance(seen, str), seen
        assert {*seen["types"]} == {"torch.float32"} and seen["halved"]
        assert seen["restored"] == seen["trained"] != seen["swapped"][0]
        loss, expected = seen["swapped"]
        assert math.isclose(loss, expected, rel_tol=1e-2 if kind == "ZeRO-3" else 1e-6)
        assert seen["training unchanged"]


def test_a_rank_has_its_part_of_each_weight(answers):
    name, numbers = "model.embed_tokens.weight", 41 * 16
    assert {k: [seen["swap"]["shapes"][name] for seen in answers[k]] for k in KINDS} == {
        "one process": [[41, 16]],
        "DDP": [[41, 16], [41, 16]],
        "FSDP2": [[21, 16], [20, 16]],
        "ZeRO-3": [[numbers // 2], [numbers // 2]],
    }


@pytest.mark.parametrize(
    "first, then",
    [(first, then) for n, then in enumerate(KINDS) for first in [*KINDS][: n + 1]],
)
def test_the_state_of_plugins_comes_back_on_any_ranks(answers, first, then):
    for answer in answers[then]:
        assert answer["save"] is True
        assert answer[first] == ""


def test_what_cannot_be_stored_is_refused_by_name(answers):
    errors = answers["one process"][0]["refuse"]
    expected = {
        "a set": "plugin 'average': state_dict() at names/0 is a builtins.set; checkpoints store",
        "a number as key": "state_dict() at epochs is a builtins.dict; checkpoints store None",
        "a tuple": "state_dict() at pair is a builtins.tuple; checkpoints store None",
        "a number of NumPy": "state_dict() at share is a numpy.float32; checkpoints store None",
        "complex": "state_dict() at phase is a tensor that is complex or sparse; checkpoints store",
        "sparse": "state_dict() at rows is a tensor that is complex or sparse; checkpoints store",
        "no such weight": "state_dict() is a slice of 'norm', and the model has no weight of that",
        "another shape": "at slice has shape [15]; this rank's slice of model.norm.weight has [16]",
        "no trained weight": "'norm' is no trained weight of the model",
        "a part too long": "model.norm.weight: this rank's part has shape [16], not [17]",
    }
    for name, words in expected.items():
        assert words in errors[name]


def test_what_differs_between_ranks_is_refused_by_name_as_it_is_saved(answers):
    for refusals in answers["DDP"]:
        assert refusals["plugin"].startswith(
            "refused: the ranks differ in plugin 'counter': state_dict() at seen: rank 0 has "
            "[0, 0], rank 1 has [0, 1]. Checkpoints store what is equal on all ranks"
        )
        assert refusals["optimizer"].startswith(
            "refused: the ranks differ in the optimizer's state of model.norm.weight at noise: rank"
        )


def test_a_text_of_numpy_is_stored_as_a_text():
    assert Encoder(torch.device("cpu"))(np.str_("name"), "plugins/one") == "name"
