"""Metric names: no plugin's figure hides another's or the core's."""

import json
from types import SimpleNamespace

import pytest
from conftest import run_plugsft
from plugin_packages import activate, install

from plugsft.base.errors import PluginError
from plugsft.registry.contracts import METRICS
from plugsft.registry.load import load

MEASURES = """
    import torch

    @plugin()
    class Measures:
        metric: str = "sharpness"

        @hookimpl
        def add_metrics(self):
            return {self.metric: torch.ones(()), f"own_{type(self).__module__}": torch.ones(())}
"""


@pytest.fixture
def company(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path, one=MEASURES, two=MEASURES), monkeypatch)
    held_out = {"every": 2, "split": "train[:8]"}
    plugins = {"one": {}, "two": {"metric": "x"}}
    return tiny(train={"steps": 2}, eval=held_out, plugins=plugins)


def test_the_core_s_metrics_are_those_that_a_run_logs(company, tmp_path):
    result = run_plugsft(company)
    assert result.returncode == 0, result.stderr
    logged = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    trained, evaluated = logged[0].keys(), logged[-1].keys()
    own = {name for name in trained if name.startswith("own_")} | {"sharpness", "x"}
    assert len(own) == 4 and trained - own <= METRICS
    assert evaluated - {"step", "eval_loss", "eval_tokens"} == {f"eval_{name}" for name in own}


@pytest.mark.parametrize("metric", [*sorted(METRICS), "eval_loss", "eval_x", "sharpness"])
def test_a_name_that_is_taken_is_refused_with_its_owners(company, metric):
    active = load(company, [f"plugins.two.metric={metric}"])[1].attach(SimpleNamespace())
    owner = {"sharpness": "of plugin '(one|two)'"}.get(metric, "a metric of plugsft|evaluation")
    with pytest.raises(PluginError, match=owner) as caught:
        active.metrics()
    assert f"its metric '{metric}'" in str(caught.value)
    named = {name for name in ("one", "two") if f"'{name}'" in str(caught.value)}
    assert named == ({"one", "two"} if metric == "sharpness" else {"two"})


def test_a_plugin_may_measure_again_what_it_has_measured(company):
    active = load(company)[1].attach(SimpleNamespace())
    assert active.metrics().keys() == active.metrics().keys() != set()


def test_a_run_with_such_names_ends_before_a_weight_has_moved(company, tmp_path):
    result = run_plugsft(company, "plugins.two.metric=sharpness")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "its metric 'sharpness' has the name of a metric of plugin '" in result.stderr
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "failed"
    assert not (tmp_path / "run/checkpoints").exists()
