"""Plugins that break a promise of their hooks end the run with the reason."""

import pytest
from conftest import (
    chats,
    must_succeed,
    only_full,
    read_metrics,
    read_record,
    run_plugsft,
    run_ranks,
    start_ranks,
)
from plugin_packages import activate, install

TRAIN = {"steps": 4, "batch_size": 8, "micro_batch": 4}
EVAL = {"every": 2, "split": "train[:4]"}
HEAD = """
    import os, sys
    from dataclasses import replace

    import torch

    RANK = int(os.environ.get("RANK", "0"))

    def cut(given, name):
        return replace(given, **{name: getattr(given, name)[:-1]})

    def add(given, **columns):
        given.columns.update(columns)
        return given

    @plugin(metrics=["one", "two", "sum", "share"])
    class Made:
        rank: int = state(0)
"""


@pytest.fixture
def recipe(tiny, tmp_path, monkeypatch):
    """Return `recipe(body)`: a recipe with a plugin of this class body."""

    def make(body, **tables):
        site = install(tmp_path / "site", made=HEAD + body)
        activate(site, monkeypatch)
        return tiny(rows=chats(24), train=TRAIN, plugins={"made": {}}, **tables)

    return make


PLANS = """
        @hookimpl(wrapper=True)
        def plan_batches(self):
            steps = [*(yield)]
            {edit}
            return steps
"""


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("steps[1] = steps[0]", "more often than the epoch's order has it; it must lay out each"),
        ("steps[0] = [[part[:-1] for part in rank] for rank in steps[0]]", "left out 2 examples"),
        ("steps[0] = [[part - 9 for part in rank] for rank in steps[0]]", "gave the example -"),
        ("steps = [step * 2 for step in steps]", "gave micro-batches per rank: [2, 2]; it must"),
        ("steps = [[[]] for step in steps]", "gave micro-batches per rank: [0]; it must give each"),
        ("steps = [[0, 1], [2, 3]]", "gave micro-batches per rank: []; it must give each"),
        ("steps = [1, 2]", "gave micro-batches per rank: []; it must give each"),
        ("steps = [[[[0.5]]] for step in steps]", "gave float64 values of shape [1] for step 1 of"),
    ],
)
def test_a_plan_that_repeats_or_loses_examples_is_refused(recipe, edit, message):
    result = run_plugsft(recipe(PLANS.format(edit=edit)))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "error: 'plan_batches' of plugin 'made' " in result.stderr and message in result.stderr


HALVES = "[[rank[: len(rank) // 2] for rank in step] for step in steps]"


def test_a_plan_without_half_of_the_micro_batches_is_refused_before_step_1(recipe, tmp_path):
    """Of an epoch, too, which the run does not finish."""
    result = run_plugsft(recipe(PLANS.format(edit=f"steps = {HALVES}")), "train.steps=1")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "error: 'plan_batches' of plugin 'made' left out 12 examples of the" in result.stderr
    assert not (tmp_path / "run/metrics.jsonl").exists()


COLLATES = """
        @hookimpl(wrapper=True)
        def collate(self):
            batch = yield
            {edit}
            return batch
"""


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("batch = {name: value[:-1] for name, value in batch.items()}", "other 'labels' than"),
        ("batch['labels'][0] = -100", "other 'labels' than their tokens: it must keep all targets"),
        ("batch['labels'] = batch['input_ids'].clone()", "other 'labels' than their tokens"),
        ("batch['labels'] = batch['labels'].flip(0)", "other 'labels' than their tokens"),
        ("batch['labels'] = batch['labels'].roll(1, 1)", "other 'input_ids' than their tokens"),
        ("batch['input_ids'] = batch['input_ids'].roll(1, 1)", "other 'input_ids' than their"),
        ("batch['input_ids'] = batch['input_ids'][:1]", "other 'input_ids' than their tokens"),
        ("del batch['input_ids']", "gave a batch without the tensor 'input_ids'; add it"),
        ("batch = [batch]", "wrapper of 'collate' gave a value of type list; it must give Batch"),
    ],
)
def test_a_batch_that_trains_other_targets_is_refused(recipe, edit, message):
    result = run_plugsft(recipe(COLLATES.format(edit=edit)))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "plugin 'made'" in result.stderr and message in result.stderr


GIVES = """
        @hookimpl(wrapper=True)
        def {hook}(self):
            given = yield
            return {value}
"""


@pytest.mark.parametrize(
    ("hook", "value", "message"),
    [
        ("load_batches", "[1]", "gave 1; it must give what build(step) returned"),
        (
            "load_batches",
            "(type(one)(one.plan, one.batches[:1]) for one in given)",
            "gave 1 micro-batches in place of 2 for step 1; it must give all that were built",
        ),
        ("step", "given.expand(2)", "gave no tensor of one number; it must give the micro-batch's"),
        ("token_nll", "given.expand(2)", "gave no tensor of one number; it must give the micro-"),
        ("step", "given.detach()", "gave a loss that depends on no trained weight"),
        ("use_weights", "{'eval_loss': 1.0}", 'did not return what work() returned for "evaluate"'),
        ("cache", "5", "gave 5; return what read(folder, in_memory) returned"),
        ("tokenize", "given * 2", "; it must give a shard for each of 1 slices, in order"),
        ("render", "cut(given, 'texts')", "gave 23 texts, 24 lists of spans and 24 rows; it must"),
        ("render", "replace(given, texts=[5] * 24)", "gave the text 5; each text is a string"),
        ("encode", "replace(given, ids=given.ids / 2)", "gave ids, counts and ends of float64, "),
        ("encode", "cut(given, 'ids')", "; it must give each text its count, and each token its"),
        ("encode", "cut(given, 'counts')", "gave 23 counts for 24 texts, "),
        ("add_columns", "add(given, x=[1, 2])", "gave the column 'x' of length 2 for 24 examples"),
        ("tokenize", "[5]", "gave [5]; it must give a shard for each of 1 slices, in order"),
    ],
)
def test_a_wrong_result_is_refused_with_its_plugin(recipe, hook, value, message):
    result = run_plugsft(recipe(GIVES.format(hook=hook, value=value), eval=EVAL))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert f"'{hook}' of plugin 'made'" in result.stderr and message in result.stderr


LOADS = """
        @hookimpl
        def load_batches(self, build, steps):
            return map(build, {steps})
"""


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("list(steps)[:2]", "gave the end in place of step 3"),
        ("reversed(steps)", "gave step 4 in place of step 1"),
        ("[*steps, 4]", "gave step 4 in place of the end"),
    ],
)
def test_lost_and_reordered_batches_are_refused(recipe, steps, message):
    result = run_plugsft(recipe(LOADS.format(steps=steps)))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert (
        f"error: 'load_batches' of plugin 'made' {message}; it must give every step, in order"
        in result.stderr
    )


METRICS = """
        @hookimpl
        def add_metrics(self):
            names = {names}
            return {{name: torch.tensor(value) for name, value in names.items()}}
"""
DIFFERING = {
    "metrics": (
        METRICS.format(names="{'one': 1.0} if RANK else {}"),
        "the ranks differ in the names that 'add_metrics' gave: rank 0 has none, rank 1 has one",
    ),
    "schedule": (
        """
        @hookimpl
        def schedule(self, train, steps):
            return lambda step: 1.0 - RANK / 2
        """,
        "the ranks differ in the learning rates",
    ),
    "order": (
        """
        @hookimpl(wrapper=True)
        def order_examples(self):
            order = yield
            order[-2:] = order[-2:][::-1] if RANK else order[-2:].copy()
            return order
        """,
        "the ranks differ in the order of examples",
    ),
    "later order": (
        """
        @hookimpl(wrapper=True)
        def order_examples(self, epoch):
            order = yield
            return order[::-1].copy() if RANK and epoch else order
        """,
        "the ranks differ in the layout of step 4: rank 0 has ",
    ),
    "columns": (
        """
        @hookimpl(wrapper=True)
        def add_columns(self):
            import numpy as np

            tokens = yield
            tokens.columns["score"] = np.full(len(tokens), RANK)
            return tokens
        """,
        "the ranks differ in the columns of examples",
    ),
    "load": (
        LOADS.format(steps="list(steps)[:2] if RANK else steps"),
        "'load_batches' of plugin 'made' gave the end in place of step 3",
    ),
    "reduce": (
        """
        @hookimpl
        def stepped(self, run):
            run.ranks.reduce(torch.ones(2 + RANK))
        """,
        "rank 0 has reducing values of a plugin (torch.float32 [2]), rank 1 has reducing",
    ),
    "generate": (
        """
        @hookimpl
        def stepped(self, run):
            run.model.generate(["hello"] * (RANK + 1), max_tokens=2)
        """,
        "the ranks are at different operations: rank 0 has generating answers to",
    ),
    "exit": (
        """
        @hookimpl
        def stepped(self, run):
            if RANK and run.step == 2:
                sys.exit(0)
        """,
        "plugin 'made' ended the program in its hook 'stepped', as sys.exit() does",
    ),
}


OFTEN = ("metrics", "order", "reduce", "exit")
"""The others run with tools/test --full."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[only_full] * (name not in OFTEN)) for name in DIFFERING]
)
def test_ranks_that_differ_end_with_the_reason(recipe, name):
    body, message = DIFFERING[name]
    ended = [process.wait() for process in start_ranks(2, recipe(body))]
    assert {process.returncode for process in ended} <= {1, 2}, ended[0].stderr
    for process in ended:
        assert message in process.stderr and "Traceback" not in process.stderr


def test_ranks_may_give_their_metrics_in_any_order(recipe, tmp_path):
    names = "{'one': 1.0, 'two': 5.0} if RANK else {'two': 5.0, 'one': 1.0}"
    run_ranks(2, recipe(METRICS.format(names=names)))
    for line in read_metrics(tmp_path / "run"):
        assert line["two"] == pytest.approx(5 * line["one"])


SUM = """
        @hookimpl
        def add_metrics(self):
            return {{"sum": {value}, "share": torch.ones(())}}
"""


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("torch.ones(2)", "a tensor of 2 numbers"),
        ("torch.tensor(1j)", "tensor(0.+1.j)"),
        ("None", "None"),
        ("'7'", "'7'"),
        ("[7.0]", "[7.0]"),
    ],
)
def test_a_metric_that_is_not_one_number_is_refused(recipe, value, what):
    result = run_plugsft(recipe(SUM.format(value=value)))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert (
        f"plugin 'made': its metric 'sum' is {what}; return the sum of this rank, as a number or "
        "a tensor of one number"
    ) in result.stderr


@pytest.mark.parametrize("value", ["2", "2.0", "2 * torch.ones(1, 1)", "torch.tensor(2)"])
def test_a_metric_is_a_number_or_a_tensor_of_one_number(recipe, tmp_path, value):
    must_succeed(recipe(SUM.format(value=value)))
    for line in read_metrics(tmp_path / "run"):
        assert line["sum"] == pytest.approx(2 * line["share"])


def test_a_wrong_swap_leaves_the_trained_weights(recipe):
    body = """
        @hookimpl
        def stepped(self, run):
            trained = {name: shard.clone() for name, shard in run.model.shards().items()}
            others = {name: torch.zeros_like(shard) for name, shard in trained.items()}
            others[[*others][-1]] = torch.zeros(3)
            try:
                with run.model.swapped(others):
                    pass
            except PluginError as error:
                assert "has shape" in str(error)
            for name, shard in run.model.shards().items():
                assert torch.equal(shard, trained[name])
    """
    must_succeed(recipe(body))


def test_a_plugin_may_answer_use_weights(recipe, tmp_path):
    body = """
        @hookimpl
        def use_weights(self, work):
            return work()
    """
    must_succeed(recipe(body, eval=EVAL))
    assert (tmp_path / "run/model/config.json").exists()


def test_a_model_that_use_weights_does_not_save_is_missed(recipe):
    body = """
        @hookimpl
        def use_weights(self, purpose, work):
            return work() if purpose == "evaluate" else "nothing"
    """
    result = run_plugsft(recipe(body, eval=EVAL))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "'use_weights' of plugin 'made' did not call work() for \"save\"" in result.stderr


def test_a_hook_that_clears_its_metrics_or_adds_facts_does_no_harm(recipe, tmp_path):
    body = """
        @hookimpl
        def ready(self, run):
            run.facts["made"] = {"folder": run.output}

        @hookimpl
        def logged(self, metrics):
            metrics.clear()
    """
    must_succeed(recipe(body, eval=EVAL, checkpoint={"keep_best": "eval_loss"}))
    record = read_record(tmp_path / "run")
    assert record["made"] == {"folder": str(tmp_path / "run")} and record["best"]["step"] == 4


def test_a_column_with_the_name_of_a_shape_is_refused(recipe):
    body = """
        @hookimpl(wrapper=True)
        def render(self, rows):
            rendered = yield
            rendered.columns["longest"] = [1] * len(rows)
            return rendered
    """
    result = run_plugsft(recipe(body))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "a plugin's column 'longest' has the name of a column of plugsft" in result.stderr
