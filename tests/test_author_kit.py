"""plugsft.testing: a good plugin passes, and a bad one is told what to change."""

import pytest
from author import write_plugin

from plugsft import testing

LAWS = (
    testing.keeps_gradients,
    testing.resumes,
    testing.ranks_agree,
    testing.survives_a_worker,
    testing.summary,
)
GOOD = """
import torch

@plugin(metrics=["rows_seen"])
class Good:
    times: int = 1
    seen: int = state(0)
    average: float = state(0.0)
    pending: int = state(0)

    @hookimpl(wrapper=True)
    def step(self, batch):
        loss = yield
        self.seen += self.times
        self.pending += len(batch["input_ids"])
        return loss

    @hookimpl(wrapper=True)
    def encode(self):
        return (yield)

    @hookimpl
    def collate(self, tokens, examples, pad):
        from plugsft.model.defaults import ModelDefaults
        return ModelDefaults().collate(tokens, examples, pad)

    @hookimpl
    def add_metrics(self):
        pending, self.pending = self.pending, 0
        return {"rows_seen": torch.tensor(float(pending))}

    @hookimpl
    def logged(self, metrics):
        self.average += 0.1 * (metrics.get("loss", 0) - self.average)

    @hookimpl
    def state_dict(self):
        return {"average": self.average, "seen": self.seen, "list": [torch.arange(9)]}

    @hookimpl
    def load_state_dict(self, state):
        self.average, self.seen = state["average"], state["seen"]

    @hookimpl
    def summary(self):
        return f"{self.seen} seen"
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Give `install(code)`: an installed plugin named bad."""

    def write(code):
        monkeypatch.syspath_prepend(write_plugin(tmp_path / "site", "bad", code))

    return write


def refuse(law, *words, **arguments):
    """Check that a law fails with these words."""
    with pytest.raises(AssertionError) as failed:
        law("bad", **arguments)
    message = str(failed.value)
    assert "plugin 'bad'" in message
    for word in words:
        assert word in message, message


def test_a_good_plugin_keeps_every_law(install):
    install(GOOD)
    testing.keeps_gradients("bad", {"times": 2}, ranks=2)
    testing.resumes("bad", ranks=2)
    testing.ranks_agree("bad", tables={"eval": {"every": 4, "split": "train[:8]"}})
    testing.survives_a_worker("bad")
    # Other tests share the cores.
    testing.costs_at_most("bad", 400, tables={"train": {"epochs": 1}})
    # Six steps of four micro-batches.
    assert testing.summary("bad", {"times": 2}) == "48 seen"


WRAPPER = """
@plugin()
class Bad:
    @hookimpl(wrapper=True)
    def {hook}:
        {before}
        given = yield
        {after}
"""


def wrapper(hook, after="return given", before="pass"):
    return WRAPPER.format(hook=hook, after=after, before=before)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            wrapper("step(self)", "return given * 1.0001"),
            ["step 1: loss", "divided by `denominator`"],
        ),
        (
            wrapper("step(self)", "return given.detach() + 0.5 * (given - given.detach())"),
            ["step 1: grad_norm", "its gradient is not"],
        ),
        (
            wrapper("order_examples(self)", "return given[:-8]"),
            ["4 steps and evaluations with it, and 6 without"],
        ),
        (
            wrapper("plan_batches(self)", "return [*given][1:] + [given[0]]"),
            ["step 1: trained_tokens", "moved to another step"],
        ),
        (
            wrapper("optimizer(self)", "given.param_groups[0]['lr'] *= 2; return given"),
            ["step 2: loss"],
        ),
    ],
    ids=["scaled loss", "scaled gradient", "lost examples", "other order", "other rate"],
)
def test_what_changes_learning_does_not_keep_gradients(install, code, words):
    install(code)
    refuse(testing.keeps_gradients, *words)


OF_SECOND_RANK = "import os\nrank = int(os.environ.get('RANK', 0))\n"


def test_a_packer_beside_the_plugin_sets_the_micro_batch(install):
    install(wrapper("step(self)"))
    packed = {"plugins": {"bfd_packing": {"capacity": 512}}}
    testing.keeps_gradients("bad", tables=packed)
    words = ["train.micro_batch has no effect", "remove it"]
    refuse(testing.keeps_gradients, *words, tables=packed | {"train": {"micro_batch": 4}})


def test_what_changes_learning_on_a_rank_only_does_not_keep_gradients(install):
    install(OF_SECOND_RANK + wrapper("step(self)", "return given * (1 + 0.1 * rank)"))
    refuse(testing.keeps_gradients, "step 1: loss", ranks=2)


NOISE = """
@plugin()
class Bad:
    calls: int = state(0)

    @hookimpl(wrapper=True)
    def step(self):
        loss = yield
        self.calls += 1
        return loss * (1 + self.calls / 100)
"""
KEPT_ELSEWHERE = """
from torch.optim import SGD

taken = []  # a checkpoint holds what the optimizer holds, but not this

class Growing(SGD):
    def step(self, closure=None):
        taken.append(1)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data -= 1e-3 * len(taken) * weight.grad

@plugin()
class Bad:
    @hookimpl
    def optimizer(self, model, train):
        return Growing(model.parameters(), lr=train.learning_rate)
"""
FORGETFUL = """
@plugin()
class Bad:
    steps: int = state(0)

    @hookimpl
    def stepped(self):
        self.steps += 1

    @hookimpl
    def state_dict(self):
        return {"counts": [self.steps]}

    @hookimpl
    def load_state_dict(self, state):
        pass
"""
SAYS = """
import time

@plugin()
class Bad:
    seen: int = state(0)

    @hookimpl
    def stepped(self):
        self.seen += 1

    @hookimpl
    def summary(self):
        return f"{{self.seen}} steps{more}"
"""
HEARS_STEPS = """
@plugin()
class Bad:
    seen: int = state(0)

    @hookimpl
    def stepped(self, run):
        self.seen += 1
        if self.seen == {at}:
            {action}
"""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (NOISE, ["after step 2, step 3: loss is", "from `state_dict`"]),
        (KEPT_ELSEWHERE, ["after step 2, step 4: loss is", "An optimizer keeps it in its `state`"]),
        (FORGETFUL, ["rank 0: plugin 'bad': state_dict() at counts is [4] resumed and [6] unin"]),
        (
            HEARS_STEPS.format(at=5, action="run.stop('enough')"),
            ["4 steps and evaluations resumed"],
        ),
        (
            HEARS_STEPS.format(at=6, action="next(run.model.module.parameters()).data[-1] += 1"),
            ["after step 2, rank 0: ", " resumed and "],
        ),
        (SAYS.format(more=""), ["summary() is '4 steps', and '6 steps' uninterrupted"]),
    ],
    ids=["in the loss", "in the optimizer", "in its state", "a stop", "in the weights", "said"],
)
def test_what_forgets_its_state_does_not_resume(install, code, words):
    install(code)
    refuse(testing.resumes, *words)


def test_a_summary_that_depends_on_the_clock_is_not_compared(install):
    install(SAYS.format(more=" at {{time.time()}}").replace("{{", "{").replace("}}", "}"))
    testing.resumes("bad")


def test_what_forgets_its_state_on_a_rank_only_does_not_resume(install):
    code = NOISE.replace("self.calls / 100", "rank * self.calls / 100")
    install(OF_SECOND_RANK + code)
    testing.resumes("bad")
    refuse(testing.resumes, "after step 2, step 3: ", ranks=2)


METRIC = """
import torch

@plugin(metrics=['share'])
class Bad:
    @hookimpl
    def add_metrics(self):
        return {"share": torch.tensor(1.0)}
"""
MEAN = """
@plugin()
class Bad:
    @hookimpl
    def step(self, model, batch, denominator, token_nll):
        return token_nll(model=model, batch=batch, summed=False).mean()
"""
OWN_STATE = """
@plugin()
class Bad:
    step_seconds: float = state(0.0)

    @hookimpl
    def logged(self, metrics):
        self.step_seconds = metrics["step_seconds"]

    @hookimpl
    def state_dict(self):
        return {"seconds": self.step_seconds}

    @hookimpl
    def load_state_dict(self, state):
        self.step_seconds = state["seconds"]
"""
ENDS_RANK = OF_SECOND_RANK + HEARS_STEPS.format(at=2, action="if rank: os._exit(7)")
FAILS_ON_RANK = OF_SECOND_RANK + wrapper("step(self)", "return [given][rank]")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            OF_SECOND_RANK + wrapper("step(self)", "return given * (1 + 0.1 * rank)"),
            ["step 1: loss is", "Divide by `denominator`"],
        ),
        (MEAN, ["step 1: loss is", "2 examples on two ranks, and 4 on one", "not their mean"]),
        (METRIC, ["step 1: share is", "sums over the rank's own micro-batches"]),
        (
            OWN_STATE,
            ["state_dict() at seconds: rank 0 has ", "rank 1 has", "what is equal on all ranks"],
        ),
        (
            OF_SECOND_RANK
            + HEARS_STEPS.format(
                at=6, action="next(run.model.module.parameters()).data[-1] += rank"
            ),
            ["on rank 1 and ", "on rank 0: ", "whoever changes weights"],
        ),
        (FAILS_ON_RANK, ["IndexError"]),
        (ENDS_RANK, ["terminated abruptly"]),
    ],
    ids=["loss", "mean", "metric", "state", "weights", "error", "exit"],
)
def test_what_depends_on_the_ranks_does_not_agree(install, code, words):
    install(code)
    refuse(testing.ranks_agree, *words)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import multiprocessing\nassert multiprocessing.parent_process() is None",
            ["AssertionError"],
        ),
        (
            wrapper("encode(self)", "given.ids[0] = os.getpid(); return given").replace(
                "@plugin", "import os\n\n@plugin"
            ),
            ["a worker process wrote other tokens", "on random numbers"],
        ),
        (
            """
            @plugin()
            class Bad:
                count: int = state(0)

                @hookimpl(wrapper=True)
                def encode(self):
                    given = yield
                    self.count += 1
                    given.ids[0] = self.count
                    return given
            """,
            ["a worker process wrote other tokens", "not on earlier rows"],
        ),
        (
            """
            @plugin()
            class Bad:
                first: int | None = state()

                @hookimpl
                def check(self):
                    self.first = 7

                @hookimpl(wrapper=True)
                def encode(self):
                    given = yield
                    given.ids[0] = self.first
                    return given
            """,
            ["in a worker process", "TypeError"],
        ),
    ],
    ids=["not importable", "process id", "count", "set in check"],
)
def test_what_depends_on_its_process_does_not_survive_a_worker(install, code, words):
    install(code)
    refuse(testing.survives_a_worker, *words)


def test_what_works_in_every_step_costs_too_much(install):
    install("import time\n" + wrapper("step(self)", before="time.sleep(0.03)"))
    refuse(
        testing.costs_at_most,
        "ms with it and ",
        "% more, and at most 50% is allowed",
        percent=50,
        tables={"train": {"epochs": 1}},
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (wrapper("step(self)", "pass"), ["wrapper of 'step' returned nothing", "return what"]),
        (wrapper("load_batches(self)", "pass"), ["wrapper of 'load_batches' returned nothing"]),
        (wrapper("render(self)", "pass"), ["wrapper of 'render' returned nothing"]),
        (
            "@plugin()\nclass Bad:\n    @hookimpl\n    def optimizer(self, model):\n        pass",
            ["its answer to 'optimizer' is None", "return the result"],
        ),
        (
            "@plugin()\nclass Bad:\n    @hookimpl\n    def stop(self, model):\n        pass",
            ["stop() is no hook", "did you mean 'step'?"],
        ),
        (
            "@plugin()\nclass Bad:\n    @hookimpl\n    def state_dict(self):\n        return {}",
            ["state_dict() and no load_state_dict()", "add load_state_dict()"],
        ),
        (
            "@plugin()\nclass Bad:\n    @hookimpl\n    def load_state_dict(self):\n        pass",
            ["load_state_dict() and no state_dict()", "add state_dict()"],
        ),
        (wrapper("step(self, modell)"), ["no argument 'modell'", "did you mean 'model'?"]),
        (
            "@plugin()\nclass Bad:\n    @hookimpl\n    def logged(self):\n        1 / 0",
            ["ZeroDivisionError"],
        ),
    ],
    ids=[
        "step",
        "load_batches",
        "render",
        "answer",
        "misspelt hook",
        "state_dict alone",
        "load_state_dict alone",
        "misspelt argument",
        "raises",
    ],
)
def test_what_returns_nothing_or_raises_is_refused(install, code, words):
    install(code)
    refuse(testing.summary, *words)


ANSWERS = """
from plugsft import AnswerLoss

@plugin(affects_results=["power"], metrics=["mean_nll"])
class Answers(AnswerLoss):
    "Train each answer as much as any other, however long it is."

    power: float = 1.0

    def losses(self, model, batch, token_nll):
        log_probs, _ = self.score(model, batch, token_nll)
        means = -log_probs / batch["_targets"] ** self.power
        return means, {"mean_nll": means}
"""


def test_a_loss_over_whole_answers_learns_the_same_on_two_ranks(install):
    install(ANSWERS)
    testing.ranks_agree("bad", tables={"train": {"batch_size": 6, "micro_batch": 2}})


def test_a_run_that_is_too_short_to_resume_is_named(install):
    install(GOOD)
    refuse(testing.resumes, "train for at least 4 steps", tables={"train": {"steps": 2}})


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_law_says_how_to_install_a_missing_plugin(law):
    with pytest.raises(AssertionError, match=r"no plugin 'nowhere' .* pip install -e \."):
        law("nowhere")


def test_wrong_options_are_named(install):
    install(GOOD)
    refuse(testing.survives_a_worker, "plugins.bad.tims", "did you mean", options={"tims": 1})
