"""Resuming an optimizer with state of any kind equals never stopping."""

import json
from collections import defaultdict
from functools import cache, partial
from threading import Event
from types import SimpleNamespace

import optimizers
import pytest
import schedulefree
import torch
from conftest import FULL, only_full, tiny_tables, write_recipe
from launching import FSDP2, ZERO3
from safetensors import safe_open
from safetensors.torch import save_file
from saved_runs import Run, differing, on_ranks

from plugsft.base.atomic import MANIFEST, stamp
from plugsft.base.errors import PlugsftError
from plugsft.checkpoint.same_run import keys_affecting_results
from plugsft.registry.load import load


def resumed_is_uninterrupted(name, accelerator, recipe, active):
    """Say in what a resumed run differs from one that went through."""
    recipe = recipe.model_copy(update={"output": str(recipe.folder / name)})
    whole = Run(name, accelerator, recipe, active)
    whole.train(range(1, 4))
    trained = Event()
    whole.checkpoints._thread.submit(trained.wait)
    try:
        whole.checkpoints.begin(3)
    except PlugsftError:
        trained.set()
        raise
    saved = whole.everything()
    (recipe.folder / f"saved-{accelerator.process_index}.json").write_text(
        json.dumps(whole.everything(full=True))
    )
    # The training is over before a byte of the checkpoint is written.
    whole.train(range(4, 7))
    assert whole.checkpoints.publish() is None
    trained.set()
    assert whole.checkpoints.publish(wait=True) == 3
    parts = Run(name, accelerator, recipe, active, seed=1)
    parts.checkpoints.restore([recipe.folder / "checkpoints/step-000003"])
    for group in parts.optimizer.param_groups:
        group["lr"] = 1e-2 / 3
    restored = differing(saved, parts.everything(), "restored")
    parts.train(range(4, 7))
    return restored or differing(whole.everything(), parts.everything(), "trained on")


def make_schedule_free(model):
    """Return the real schedule-free AdamW, in training mode."""
    optimizer = optimizers.RealScheduleFree(optimizers.own_groups(model), lr=1e-3)
    optimizer.train()
    return optimizer


def resumed_from_evaluation_mode(name, accelerator, recipe, active):
    """Save schedule-free AdamW in evaluation mode; say in what a resumed run differs."""
    recipe = recipe.model_copy(update={"output": str(recipe.folder / "evaluation")})
    whole = Run(name, accelerator, recipe, active, make=make_schedule_free)
    whole.train(range(1, 4))
    trained = whole.everything()
    whole.optimizer.eval()
    whole.checkpoints.save(3)
    saved = whole.everything()
    assert differing(trained["weights"], saved["weights"])
    parts = Run(name, accelerator, recipe, active, seed=1, make=make_schedule_free)
    parts.checkpoints.restore([recipe.folder / "checkpoints/step-000003"])
    for group in parts.optimizer.param_groups:
        group["lr"] = 1e-2 / 3
    restored = differing(saved, parts.everything(), "restored")
    for run in (whole, parts):
        run.optimizer.train()
        run.train(range(4, 7))
    return restored or differing(whole.everything(), parts.everything(), "trained on")


ALONE = "FSDP2 on one rank"
# Optimizers of torch that use what DTensors cannot do.
NOT_ON = {kind: ["Rprop", "Adafactor"] for kind in ("FSDP2", ALONE)}
# One optimizer for each kind of state; on ranks, `tools/test --full` runs all.
EACH_KIND = ["AdamW fused", "SGD", "ASGD", "Adafactor", "Muon", *optimizers.OWN]
EVALUATION_MODE = "schedule-free, saved in evaluation mode"
KINDS = {"one process": (1, {}), "DDP": (2, {}), "FSDP2": (2, FSDP2), "ZeRO-3": (2, ZERO3)}
STARTS = KINDS | {ALONE: (1, FSDP2)}


def names_of(*kinds):
    """Name the optimizers that run on ranks of each of these kinds."""
    alone = all(kind == "one process" for kind in kinds)
    names = [*optimizers.ALL] if FULL or alone else EACH_KIND
    if "ZeRO-3" in kinds:
        return ["AdamW fused", "SGD", "ASGD", "One group"]
    return [name for name in names if not any(name in NOT_ON.get(kind, []) for kind in kinds)]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Give `said(kind)`: what each rank said of each optimizer; a kind is launched once."""

    @cache
    def of(kind):
        ranks, env = STARTS[kind]
        work = [(name, resumed_is_uninterrupted) for name in names_of(kind)]
        if kind != "ZeRO-3":
            work.append((EVALUATION_MODE, resumed_from_evaluation_mode))
        folder = tmp_path_factory.mktemp(kind.replace(" ", "-"))
        return on_ranks(ranks, env, folder, work), folder

    return of


# State of sharded weights that is neither like its weight nor equal on all ranks.
UNSTORABLE = {
    (
        "FSDP2",
        "Quantized",
    ): "the optimizer's state of model.embed_tokens.weight at codes: rank 0 has",
    (
        "FSDP2",
        "Odd",
    ): "model.embed_tokens.weight at nested/rows/0 is a DTensor of another shape than its",
    (
        ALONE,
        "Odd",
    ): "model.embed_tokens.weight at nested/rows/0 is a DTensor of another shape than its",
}


@pytest.mark.parametrize("kind, name", [(k, name) for k in KINDS for name in names_of(k)])
def test_resumed_is_uninterrupted_with_any_optimizer(said, kind, name):
    for answers in said(kind)[0]:
        if reason := UNSTORABLE.get((kind, name)):
            assert answers[name].startswith("refused: ") and reason in answers[name]
        else:
            assert answers[name] == ""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ZeRO-3"])
def test_either_mode_of_an_optimizer_comes_back(said, kind):
    for answers in said(kind)[0]:
        assert answers[EVALUATION_MODE] == ""


def resharded(source, name, accelerator, recipe, active):
    """Say in what a run differs from what another launcher saved, once it has resumed that."""
    recipe = recipe.model_copy(update={"output": str(source / "run" / name)})
    run = Run(name, accelerator, recipe, active, seed=1)
    run.checkpoints.restore([recipe.folder / "checkpoints/step-000003"])
    for group in run.optimizer.param_groups:
        group["lr"] = 1e-2 / 3
    saved = json.loads((recipe.folder / "saved-0.json").read_text())
    difference = differing(saved, json.loads(json.dumps(run.everything(full=True))), "restored")
    run.train(range(4, 6))
    return difference


# Optimizers whose state has another shape than its weight, and no meaning on another part of it.
UNDIVIDED = {("one process", "FSDP2"): ["Odd", "Quantized"], (ALONE, "FSDP2"): ["Quantized"]}


@pytest.fixture(scope="module")
def moved(said, tmp_path_factory):
    """Give `moved(first, then)`: what each rank said that resumed what other ranks had saved."""

    @cache
    def of(first, then):
        source, (ranks, env) = said(first)[1], KINDS[then]
        names = [name for name in names_of(first, then) if (first, name) not in UNSTORABLE]
        work = [(name, partial(resharded, source)) for name in names]
        return on_ranks(ranks, env, tmp_path_factory.mktemp("moved"), work)

    return of


@pytest.mark.parametrize(
    "first, then",
    [
        *(("FSDP2", "one process"), ("one process", "FSDP2"), ("DDP", "one process")),
        pytest.param(ALONE, "FSDP2", marks=only_full),
    ],
)
def test_state_is_resharded_exactly_or_refused_by_name(moved, first, then):
    undivided = UNDIVIDED.get((first, then), [])
    for answers in moved(first, then):
        for name, answer in answers.items():
            if name in undivided:
                assert answer.startswith("refused: ") and "optimizer/model." in answer, answer
                assert "resume with the launcher and the number of ranks that wrote it" in answer
            else:
                assert answer == "", name


def changed(checkpoint, **facts):
    """Change what a checkpoint says of itself, and its manifest."""
    state = json.loads((checkpoint / "state.json").read_text()) | facts
    (checkpoint / "state.json").write_text(json.dumps(state))
    return stamped(checkpoint)


def stamped(checkpoint):
    """Make the manifest of a changed checkpoint fit it."""
    files = [path for path in checkpoint.iterdir() if path.name != MANIFEST]
    (checkpoint / MANIFEST).write_text(json.dumps({path.name: stamp(path) for path in files}))
    return checkpoint


def an_older_one(name, accelerator, recipe, active):
    """Resume a checkpoint of an earlier format."""
    run = Run("SGD", accelerator, recipe, active)
    run.train(range(1, 2))
    run.checkpoints.save(1)
    run.checkpoints.restore([changed(recipe.folder / "checkpoints/step-000001", format=2)])


def a_newer_one(name, accelerator, recipe, active):
    """Resume a checkpoint of a format to come."""
    run = Run("SGD", accelerator, recipe, active)
    run.train(range(1, 2))
    run.checkpoints.save(1)
    run.checkpoints.restore([changed(recipe.folder / "checkpoints/step-000001", format=8)])


def one_of_format_6(name, accelerator, recipe, active):
    """Resume a checkpoint of the format before this one."""
    run = Run("SGD", accelerator, recipe, active)
    run.train(range(1, 2))
    run.checkpoints.save(1)
    run.checkpoints.restore([changed(recipe.folder / "checkpoints/step-000001", format=6)])


def without_a_tensor(name, accelerator, recipe, active):
    """Resume a checkpoint that lacks one tensor of the optimizer."""
    run = Run("AdamW", accelerator, recipe, active)
    path = recipe.folder / "checkpoints/step-000003"
    run.train(range(1, 4))
    run.checkpoints.save(3)
    file = path / "rank-00000-000.safetensors"
    with safe_open(file, "pt") as opened:
        places = json.loads(opened.metadata()["places"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    lost = "optimizer/model.norm.weight/exp_avg"
    del tensors[lost], places[lost]
    save_file(tensors, file, {"places": json.dumps(places)})
    Run("AdamW", accelerator, recipe, active).checkpoints.restore([stamped(path)])


def another_optimizer(name, accelerator, recipe, active):
    """Resume with an optimizer that did not write the state."""
    run = Run("RAdam", accelerator, recipe, active)
    run.train(range(1, 3))
    run.checkpoints.save(2)
    path = recipe.folder / "checkpoints/step-000002"
    Run("NAdam", accelerator, recipe, active).checkpoints.restore([path])


def another_setting(name, accelerator, recipe, active):
    """Resume with settings of groups that differ: one that stays as it is, one that changes."""

    def make(model, **options):
        return optimizers.ScheduleFree(optimizers.own_groups(model), **options)

    run = Run(name, accelerator, recipe, active, make=make)
    run.train(range(1, 5))
    run.checkpoints.save(4)
    path = recipe.folder / "checkpoints/step-000004"
    other = Run(name, accelerator, recipe, active, make=partial(make, betas=(0.8, 0.95)))
    other.checkpoints.restore([path])
    group = other.optimizer.param_groups[0]
    assert (group["betas"], group["k"]) == ((0.8, 0.95), 4)


class Unstorable(torch.optim.SGD):
    """Has an object in its state."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["codes"] = SimpleNamespace()


def an_object_in_the_state(name, accelerator, recipe, active):
    """Save an optimizer with a state that no checkpoint can store."""
    run = Run(name, accelerator, recipe, active, make=lambda model: Unstorable(model.parameters()))
    run.train(range(1, 6))
    run.checkpoints.save(5)


def own_counters(name, accelerator, recipe, active):
    """Save an optimizer that counts in its groups, and whose plugin keeps nothing."""

    def make(model):
        return schedulefree.AdamWScheduleFree(model.parameters())

    run = Run(name, accelerator, recipe, active, make=make)
    run.optimizer.train()
    run.train(range(1, 3))
    run.checkpoints.save(2)


class Counts(torch.optim.SGD):
    """Counts its steps in an attribute, and adds up gradients in a state of no weight."""

    def step(self, closure=None):
        super().step(closure)
        self.taken = getattr(self, "taken", 0) + 1
        self.state["sums"] = [float(group["params"][0].grad.sum()) for group in self.param_groups]


def own_attributes(name, accelerator, recipe, active):
    """Save an optimizer that keeps values beside the states of weights."""
    run = Run(name, accelerator, recipe, active, make=lambda model: Counts(model.parameters()))
    run.train(range(1, 3))
    run.checkpoints.save(2)


class Apart(optimizers.Combined):
    """Calls two optimizers that keep their states to themselves."""

    def __init__(self, model):
        super().__init__(model)
        for inner in self.inner:
            inner.state = defaultdict(dict)


def inner_states(name, accelerator, recipe, active):
    """Save an optimizer whose inner ones have states of their own."""
    run = Run(name, accelerator, recipe, active, make=Apart)
    run.train(range(1, 3))
    run.checkpoints.save(2)


SPECIAL = {
    "object": (
        an_object_in_the_state,
        "the optimizer's state of model.embed_tokens.weight at codes is a types.SimpleNamespace;",
    ),
    "groups": (
        own_counters,
        "'optimizer': AdamWScheduleFree changes param_groups[0]['k'], param_groups[0]['lr_max'], ",
    ),
    "attributes": (own_attributes, "Counts changes self.taken, state['sums'], and checkpoints"),
    "inner": (inner_states, "Apart changes the state of its AdamW, the state of its Muon, and"),
    "older": (
        an_older_one,
        "was written by another version of plugsft (format 2; this one reads 7)",
    ),
    "newer": (
        a_newer_one,
        "was written by another version of plugsft (format 8; this one reads 7)",
    ),
    "format 6": (
        one_of_format_6,
        "was written by plugsft 0.1.0 (commit 1faea179) or an earlier 0.2.0.dev0 (format 6;",
    ),
    "lost": (without_a_tensor, "model.norm.weight/exp_avg does not fit this model"),
    "other": (another_optimizer, "the optimizer was RAdam and is NAdam"),
}


@pytest.fixture(scope="module")
def special(tmp_path_factory):
    work = [(name, operation) for name, (operation, _) in SPECIAL.items()]
    work.append(("setting", another_setting))
    return on_ranks(1, {}, tmp_path_factory.mktemp("special"), work)[0]


@pytest.mark.parametrize("name", SPECIAL)
def test_what_a_checkpoint_of_another_kind_gives(special, name):
    says = SPECIAL[name][1]
    assert "Traceback" not in special[name]
    assert says in special[name]


def test_a_setting_that_the_user_changes_counts_and_counters_come_back(special):
    assert special["setting"] is None


def test_sources_may_move_and_their_weights_stay(tmp_path):
    tables = tiny_tables(tmp_path)
    data = tables["data"].pop("source")

    def keys(source, weight):
        sources = [{"source": source, "weight": weight}, {"source": data}]
        mixed = tables | {"data": tables["data"] | {"sources": sources}}
        return keys_affecting_results(*load(write_recipe(tmp_path / "recipe.toml", mixed)))

    assert keys("one.jsonl", 2.0) == keys("moved.jsonl", 2.0)
    one, other = keys("one.jsonl", 2.0), keys("one.jsonl", 0.5)
    assert [key for key in one if one[key] != other[key]] == ["data.sources.weight"]
