"""A row's weight multiplies its share of the loss, exactly, in every layout."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import chats, must_succeed, read_metrics, run_plugsft, run_ranks, write_jsonl
from gradients import weighted_loss
from plugin_packages import activate, install
from prepared_rows import prepare_rows, text_row
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from plugsft import DataError, PluginError, RecipeError
from plugsft.commands.recipes import check
from plugsft.plugins.fused_loss import FusedLoss
from plugsft.tokens.store import Tokens

WEIGHTS = [1, 0.25, 0, 3, None, 1.5, 1, 0]
LAYOUTS = {
    "plain": (1, {}, {"micro_batch": 16}),
    "small": (2, {"async_collate": {}, "length_group": {}}, {"micro_batch": 3}),
    "packed": (2, {"bfd_packing": {"capacity": 100}, "fused_loss": {"chunk": 7}}, {}),
}


def weighted(rows, weights=WEIGHTS):
    """Give rows weights in turn; None leaves a row without one."""
    given = [weights[number % len(weights)] for number in range(len(rows))]
    return [
        each if weight is None else {**each, "weight": weight}
        for each, weight in zip(rows, given, strict=True)
    ]


def test_weights_that_are_1_on_average_count_in_every_micro_batch(tiny, tmp_path):
    rows, losses = weighted(chats(16), [0.5, 1.5]), []
    for micro_batch in (1, 16):
        train = {"batch_size": 16, "micro_batch": micro_batch, "steps": 1}
        must_succeed(tiny(rows, train=train), f"output={tmp_path / str(micro_batch)}")
        losses.append(read_metrics(tmp_path / str(micro_batch))[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_loss_is_that_of_a_plain_computation_in_every_layout(tiny, tmp_path):
    rows, others = weighted(chats(16)), weighted(chats(9, seed=1), [0, 2, 0, 0.5])
    evaluation = {"source": str(write_jsonl(tmp_path / "eval.jsonl", others)), "every": 1}
    steps = {}
    for name, (ranks, plugins, train) in LAYOUTS.items():
        table = {"batch_size": 16, "micro_batch": 1, "steps": 2, **train}
        recipe = tiny(
            rows, train=table, eval=evaluation, plugins=plugins, output=str(tmp_path / name)
        )
        result = run_ranks(ranks, recipe)
        assert result.returncode == 0, result.stderr
        assert "data: examples have weights from 0.25 to 3, 1.29167 on average" in result.stdout
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        steps[name] = [json.loads(line) for line in lines]
    for name in ("small", "packed"):
        for ours, theirs in zip(steps["plain"], steps[name], strict=True):
            for metric in {"loss", "grad_norm", "eval_loss", "trained_tokens"} & {*ours}:
                assert ours[metric] == pytest.approx(theirs[metric], rel=1e-5), (name, metric)

    run = tmp_path / "plain"
    stored = [Tokens(folder) for folder in (run / "tokens").iterdir()]
    training, evaluated = sorted(stored, key=len, reverse=True)
    [first] = (run / "scratch").glob("model-*")
    model = AutoModelForCausalLM.from_pretrained(first)
    loss, divisor = weighted_loss(model, training, range(len(training)))
    (loss / divisor).backward()
    loss = loss.detach()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    assert steps["plain"][0]["loss"] == pytest.approx(float(loss / divisor), rel=1e-5)
    assert steps["plain"][0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    trained = AutoModelForCausalLM.from_pretrained(run / "model")
    with torch.no_grad():
        loss, divisor = weighted_loss(trained, evaluated, range(len(evaluated)))
    assert steps["plain"][-1]["eval_loss"] == pytest.approx(float(loss / divisor), rel=1e-5)


LOOKS = """
    @plugin()
    class Looks:
        @hookimpl(wrapper=True)
        def step(self, batch):
            assert "_target_weights" not in batch
            return (yield)
"""


def test_weight_1_everywhere_is_no_weight_bit_for_bit(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", looks=LOOKS), monkeypatch)
    for name, weights in (("without", [None]), ("with", [1, 1.0, None])):
        rows = weighted(chats(24), weights)
        tables = {"output": str(tmp_path / name), "eval": {"every": 2, "split": "train[:8]"}}
        recipe = tiny(rows, plugins={"looks": {}}, **tables)
        must_succeed(recipe)
    for part in ("loss", "grad_norm"):
        each = [[line[part] for line in read_metrics(tmp_path / n)] for n in ("with", "without")]
        assert each[0] == each[1]
    weights = [(tmp_path / n / "model/model.safetensors").read_bytes() for n in ("with", "without")]
    assert weights[0] == weights[1]


def test_rows_without_a_weight_count_1_whatever_else_their_source_holds(tmp_path, monkeypatch):
    monkeypatch.setattr("plugsft.data.sources.SLICE_ROWS", 2)
    parts = [
        [text_row(n, weight=w) for n, w in enumerate([2, None, ""])],
        [text_row(n) for n in range(3)],
    ]
    tokens = prepare_rows(tmp_path, [*parts, [text_row(1), text_row(2), text_row(3, weight=0)]], {})
    assert tokens.columns["weight"].tolist() == [2, 1, 1, 1, 1, 1, 1, 1]
    numbers = np.array([0, 3])
    assert tokens.weights(numbers).tolist() == [2, 1]
    assert tokens.divisor(numbers) == 2 * tokens.targets[0] + tokens.targets[3]
    parts = [[text_row(n, importance=n) for n in range(3)], [text_row(n) for n in range(3)]]
    tokens = prepare_rows(tmp_path / "named", parts, {}, columns={"weight": "importance"})
    assert tokens.columns["weight"].tolist() == [1, 2, 1, 1, 1]
    assert "weight" not in prepare_rows(tmp_path / "none", [[text_row(1)]], {}).columns
    assert not prepare_rows(
        tmp_path / "none", [[text_row(1, weight=3)]], {}, ignore=["weight"]
    ).columns


@pytest.mark.parametrize(
    ("weight", "shown"),
    [
        (-1, "-1"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (1e31, "1e.31"),
        (10**400, "10"),
        (1e-31, "1e-31"),
        (True, "true"),
        ("2", "'2'"),
    ],
    ids=["negative", "nan", "infinite", "too large", "very large", "too small", "boolean", "text"],
)
def test_a_weight_that_is_none_makes_a_bad_row(tmp_path, weight, shown):
    rows = [text_row(1), text_row(2, weight=weight)]
    with pytest.raises(DataError, match=rf"line 2: 'weight' is {shown}.*should be 0, or a num"):
        prepare_rows(tmp_path, [rows], {})
    tokens = prepare_rows(tmp_path, [rows], {}, on_bad_row="drop")
    assert tokens.columns["weight"].tolist() == [1]


def test_other_names_of_weights_are_refused_with_the_cure(tmp_path):
    message = r"'sample_weight' says how much a row counts \(\[data\.columns\] weight names it\)"
    with pytest.raises(DataError, match=message):
        prepare_rows(tmp_path, [[text_row(1, sample_weight=2)]], {})


def test_rows_of_weight_0_are_left_out_and_counted(tiny, tmp_path):
    rows = [text_row("x" * n, weight=int(n > 2)) for n in range(6)]
    recipe = tiny(rows, train={"batch_size": 2, "micro_batch": 1})
    shown = must_succeed(recipe).stdout
    assert "data: 3 examples of 6 rows" in shown and "3 rows left out" in shown
    assert "warning: data: lines 1, 2, 3: weight 0; left out" in shown
    plain = tiny(rows[3:], train={"batch_size": 2, "micro_batch": 1})
    must_succeed(plain, f"output={tmp_path / 'plain'}", f"model.tokenizer={tmp_path / 'run/model'}")
    [ours, theirs] = (
        [line["loss"] for line in read_metrics(tmp_path / n)] for n in ("run", "plain")
    )
    assert ours == theirs
    recipe = tiny([text_row(n, weight=0) for n in range(6)])
    for words in ([recipe, "--overwrite"], ["check", recipe]):
        nothing = run_plugsft(*words)
        assert nothing.returncode == 2 and "weight 0; left out" in nothing.stderr
        assert "longer than" not in nothing.stderr


OWN = """
    @plugin({provides})
    class Own:
        @hookimpl
        def step(self, model, batch, denominator, token_nll):
            nll = token_nll(model=model, batch=batch, summed=False)
            return (nll * batch.get("_target_weights", 1.0)).sum() / denominator
"""


def test_a_loss_that_may_ignore_weights_is_refused(tiny, tmp_path, monkeypatch, capsys):
    silent, honest = OWN.format(provides=""), 'provides={"weighted_examples": None}'
    activate(
        install(tmp_path / "site", own=silent, honest=OWN.format(provides=honest)), monkeypatch
    )
    recipe = tiny(weighted(chats(24)), plugins={"own": {}})
    result = run_plugsft(recipe)
    assert result.returncode == 2
    assert "plugins.own: its loss may ignore the weights of the rows" in result.stderr
    assert 'data.ignore = ["weight"] trains without them' in result.stderr
    with pytest.raises(RecipeError, match=r"plugins\.own: its loss may ignore the weights"):
        check(recipe, [], [], None)
    must_succeed(recipe, 'data.ignore=["weight"]', f"output={tmp_path}/ignored")
    for name, plugins in (("plain", "{}"), ("own", "{honest={}}")):
        must_succeed(recipe, f"plugins={plugins}", f"output={tmp_path / name}")
    losses = [[line["loss"] for line in read_metrics(tmp_path / n)] for n in ("plain", "own")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


FORGETS = """
    @plugin()
    class Forgets:
        @hookimpl(wrapper=True)
        def collate(self):
            batch = yield
            batch["labels"][:, ::2] = -100
            return batch
"""


def test_a_batch_without_some_targets_is_refused(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", forgets=FORGETS), monkeypatch)
    result = run_plugsft(tiny(weighted(chats(24)), plugins={"forgets": {}}))
    assert result.returncode == 2
    assert "and other 'labels' than their tokens: it must keep all targets" in result.stderr


NO_LABELS = """
    import torch

    @plugin(provides={"weighted_examples": None})
    class Nolabels:
        @hookimpl(wrapper=True)
        def collate(self, examples):
            batch = yield
            return batch | {"labels": torch.ones(len(examples))}

        @hookimpl
        def step(self, model, batch):
            return model(batch["input_ids"]).logits.sum()
"""


def test_weights_of_rows_need_a_label_for_each_token(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", nolabels=NO_LABELS), monkeypatch)
    recipe = tiny(weighted(chats(24)), plugins={"nolabels": {}})
    result = run_plugsft(recipe)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert (
        "'collate' of plugin 'nolabels' gave no label for each token, so that the rows' weights "
        'cannot be assigned to targets; data.ignore = ["weight"] trains without them'
    ) in result.stderr
    must_succeed(recipe, 'data.ignore=["weight"]', "train.steps=1")


WEIGHS = """
    @plugin()
    class Weighs:
        weight: float

        @hookimpl(wrapper=True)
        def render(self, rows):
            rendered = yield
            rendered.columns["weight"] = [self.weight] * len(rows)
            return rendered
"""


def test_a_plugin_may_weigh_rows(tmp_path, monkeypatch):
    activate(install(tmp_path / "site", weighs=WEIGHS), monkeypatch)
    tokens = prepare_rows(tmp_path, [[text_row(1), text_row(2)]], {"weighs": {"weight": 0.5}})
    assert tokens.divisor() == 0.5 * tokens.targets.sum()
    with pytest.raises(
        PluginError, match=r"the column 'weight' the value -0\.5; it must be 0, or a"
    ):
        prepare_rows(tmp_path, [[text_row(1), text_row(2)]], {"weighs": {"weight": -0.5}})


def test_liger_s_loss_refuses_weights():
    plugin = FusedLoss(kernel="liger")
    plugin.package, plugin.loss = "liger", SimpleNamespace(proved="on another model", counts=True)
    wrapper = plugin.add_columns(None)
    next(wrapper)
    with pytest.raises(RecipeError, match="the rows have weights; set kernel"):
        wrapper.send(SimpleNamespace(columns={"weight": np.array([0, 1, 2])}))
    # It computes no example of weight 0.
    wrapper = plugin.add_columns(None)
    next(wrapper)
    with pytest.raises(StopIteration):
        wrapper.send(SimpleNamespace(columns={"weight": np.array([0, 1, 1])}))


def test_a_pair_s_weight_multiplies_its_loss(tiny, tmp_path):
    """With the loss of chosen answers, the first loss depends on the pairs."""
    rows = [
        {"prompt": "who? ", "chosen": "owls" + " hoot" * n, "rejected": "elks", "weight": n % 3}
        for n in range(10)
    ]
    steps = {}
    train = {"batch_size": 10, "micro_batch": 3, "steps": 2}
    for name, ranks, plugins in (("one", 1, {}), ("two", 2, {"bfd_packing": {}})):
        table = train | ({"micro_batch": 1} if plugins else {})
        plugins |= {"dpo": {"nll": 1.0}}
        recipe = tiny(rows, train=table, plugins=plugins, output=str(tmp_path / name))
        result = run_ranks(ranks, recipe)
        assert result.returncode == 0, result.stderr
        steps[name] = read_metrics(tmp_path / name)
    for ours, theirs in zip(*steps.values(), strict=True):
        for metric in ("loss", "grad_norm", "nll", "accuracy", "margin"):
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4, abs=1e-6), metric
    [folder] = (tmp_path / "one/tokens").iterdir()
    [first] = (tmp_path / "one/scratch").glob("model-*")
    tokens, model = Tokens(folder), AutoModelForCausalLM.from_pretrained(first)
    nll, divisor = 0.0, 0.0
    for number in range(len(tokens)):
        ids, mask = map(torch.from_numpy, tokens.example(number))
        length = tokens.sequences(np.array([number]))[0][0]
        ids, mask = ids[:length].long(), mask[1:length]
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        weight = rows[tokens.rows[number]]["weight"]
        nll += weight * float(cross_entropy(logits[mask], ids[1:][mask]))
        divisor += weight
    assert steps["one"][0]["loss"] == pytest.approx(nll / divisor + math.log(2), rel=1e-5)
    assert steps["one"][0]["nll"] == pytest.approx(nll / divisor, rel=1e-5)


def test_evaluation_rows_without_a_weight_count_1(tiny, tmp_path):
    rows = [text_row("x" * n, weight=1 + n % 2) for n in range(12)]
    plain = [text_row("y" * n) for n in range(4)]
    losses = []
    for held_out in (plain, [{**row, "weight": 1} for row in plain]):
        source = write_jsonl(tmp_path / "held_out.jsonl", held_out)
        must_succeed(tiny(rows, eval={"source": str(source)}), "train.steps=2", "--overwrite")
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        losses.append(json.loads(lines[-1])["eval_loss"])
    assert losses[0] == losses[1]
