"""plugsft.testing: a good plugin passes, and a bad one is told what to change."""

import pytest
from author import write_plugin

from plugsft import testing

GOOD = """
@plugin()
class Good:
    times: int = 1
    seen: int = state(0)

    @hookimpl(wrapper=True)
    def step(self):
        loss = yield
        self.seen += self.times
        return loss

    @hookimpl(wrapper=True)
    def encode(self):
        return (yield)

    @hookimpl
    def collate(self, tokens, examples, pad):
        from plugsft.model.defaults import ModelDefaults
        return ModelDefaults().collate(tokens, examples, pad)

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


def refuse(check, *words, **given):
    """Return the message with which a check fails."""
    with pytest.raises(AssertionError) as failed:
        check("bad", **given)
    message = str(failed.value)
    assert "plugin 'bad'" in message
    for word in words:
        assert word in message, message
    return message


def test_a_good_plugin_passes_every_check(install):
    install(GOOD)
    testing.keeps_gradients("bad", {"times": 2}, {"train": {"epochs": 1}})
    testing.survives_worker("bad")
    testing.returns_what_it_wrapped("bad")
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
            wrapper("plan_batches(self)", "return [one for one in given][:-1]"),
            ["4 steps with it and 6"],
        ),
        (
            wrapper("plan_batches(self)", "return [*given[1:], given[0]]"),
            ["step 1: trained_tokens", "moved to another step"],
        ),
        (
            wrapper("optimizer(self)", "given.param_groups[0]['lr'] *= 2; return given"),
            ["step 2: loss"],
        ),
    ],
    ids=["scaled loss", "scaled gradient", "lost batch", "other order", "other rate"],
)
def test_what_changes_learning_does_not_keep_gradients(install, code, words):
    install(code)
    refuse(testing.keeps_gradients, *words)


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
    refuse(testing.survives_worker, *words)


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
        "misspelt argument",
        "raises",
    ],
)
def test_what_returns_nothing_or_raises_is_refused(install, code, words):
    install(code)
    refuse(testing.returns_what_it_wrapped, *words)


def test_a_plugin_that_is_not_installed_is_told_how(install):
    for check in (
        testing.keeps_gradients,
        testing.survives_worker,
        testing.returns_what_it_wrapped,
    ):
        with pytest.raises(AssertionError, match=r"no plugin 'nowhere' .* pip install -e \."):
            check("nowhere")


def test_wrong_options_are_named(install):
    install(GOOD)
    refuse(testing.survives_worker, "plugins.bad.tims", "did you mean", options={"tims": 1})
